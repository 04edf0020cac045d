"""The reference for tests and `pdserve verify`: plain transformers, one prompt at a time, with its own cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from engine.checkpoints.checkpoint import eos_token_ids, open_checkpoint
from engine.checkpoints.stored_weights import StoredWeights
from engine.network import load_with_transformers
from engine.quantization.detect import find_quantization
from engine.quantization.load import plain_weights
from engine.rope import forget_lengths
from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LogitGap:
    """One position compared with plain transformers: its best token, our token, and the gap between their logits."""

    best_token: int
    token: int
    gap: float


class Oracle:
    """One model in plain transformers. Owns a copy of the weights."""

    def __init__(self, model_dir: Path, dtype: str) -> None:
        self._network: Any = load_plain(model_dir, dtype)
        self._eos = list(eos_token_ids(self._network)) or None

    @torch.inference_mode()
    def generate_greedy(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, ignore_eos: bool = False
    ) -> list[list[int]]:
        """Return the greedy continuation of each prompt, including the end-of-sequence id that ends it, if any."""
        config = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None if ignore_eos else self._eos,
            pad_token_id=0,
        )
        self._network.generation_config = config
        outputs = []
        for prompt in prompts:
            forget_lengths(self._network)
            ids = torch.tensor([list(prompt)])
            whole = self._network.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
            outputs.append([int(token) for token in whole[0, len(prompt) :]])
        return outputs

    @torch.inference_mode()
    def logit_gap(self, context: Sequence[int], token: int) -> LogitGap:
        """Return the gap at the position after `context` (teacher-forced), 0 if `token` is the oracle's choice."""
        logits = self._network(input_ids=torch.tensor([list(context)]), use_cache=False).logits[0, -1].float()
        best = int(logits.argmax())
        return LogitGap(best, token, float(logits[best] - logits[token]))


def generate_greedy(
    model_dir: Path, prompts: Sequence[Sequence[int]], max_tokens: int, dtype: str = "float32", ignore_eos: bool = False
) -> list[list[int]]:
    """Load the model in `model_dir`, continue each prompt greedily, and free the model."""
    return Oracle(model_dir, dtype).generate_greedy(prompts, max_tokens, ignore_eos=ignore_eos)


def load_plain(model_dir: Path, dtype: str) -> Any:
    """Return the network as loaded by transformers; quantised weights are dequantised first.

    Raises ConfigError if it cannot be loaded completely.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    checkpoint = open_checkpoint(model_dir)
    layout = find_quantization(model_dir, None)
    if layout is not None or checkpoint.images is not None:  # transformers would need a package per quantisation
        with StoredWeights(model_dir) as stored:
            plain = plain_weights(checkpoint.weights(stored), layout, dtype).weights
            adds_biases = layout is not None and layout.adds_biases
            return load_with_transformers(checkpoint, plain, dtype, attention=None, adds_biases=adds_biases)
    try:
        network, report = AutoModelForCausalLM.from_pretrained(
            model_dir, config=checkpoint.config, dtype=getattr(torch, dtype), trust_remote_code=False,
            use_safetensors=True, local_files_only=True, output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ConfigError(f"{model_dir}: its weights cannot be loaded: {error}") from error
    if report["missing_keys"]:
        raise ConfigError(f"{model_dir}: missing keys {sorted(report['missing_keys'])}")
    return network.eval()
