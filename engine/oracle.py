"""The independent truth of tests and of `pdserve verify`: plain transformers, one prompt at a time, its own cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from engine.checkpoint import eos_token_ids, load_network, open_checkpoint


@dataclass(frozen=True, slots=True)
class LogitGap:
    """What plain transformers thinks of one position: its own choice, ours, and how far apart their logits are."""

    best_token: int
    token: int
    gap: float


class Oracle:
    """One model in plain transformers. Owns its own copy of the weights."""

    def __init__(self, model_dir: Path, dtype: str) -> None:
        self._network: Any = load_network(open_checkpoint(model_dir), dtype=dtype, attention=None)
        self._eos = list(eos_token_ids(self._network)) or None

    @torch.inference_mode()
    def generate_greedy(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, ignore_eos: bool = False
    ) -> list[list[int]]:
        """Return the greedy continuation of each prompt, the end-of-sequence id included where it ends one."""
        config = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None if ignore_eos else self._eos,
            pad_token_id=0,
        )
        self._network.generation_config = config
        outputs = []
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            whole = self._network.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
            outputs.append([int(token) for token in whole[0, len(prompt) :]])
        return outputs

    @torch.inference_mode()
    def logit_gap(self, context: Sequence[int], token: int) -> LogitGap:
        """Return the gap at the position after `context` (teacher-forced), 0 if `token` is the oracle's own choice."""
        logits = self._network(input_ids=torch.tensor([list(context)]), use_cache=False).logits[0, -1].float()
        best = int(logits.argmax())
        return LogitGap(best, token, float(logits[best] - logits[token]))


def generate_greedy(
    model_dir: Path, prompts: Sequence[Sequence[int]], max_tokens: int, dtype: str = "float32", ignore_eos: bool = False
) -> list[list[int]]:
    """Load the model in `model_dir`, continue each prompt greedily, and let it go."""
    return Oracle(model_dir, dtype).generate_greedy(prompts, max_tokens, ignore_eos=ignore_eos)
