"""Whether a network's rows meet nowhere but in attention, tried on its weights where nobody has seen it exact."""

from typing import Any

import torch

from engine.attention.interface import AttentionOptions
from engine.attention.registered import NAME, attach
from wire.errors import ConfigError

TRIED = frozenset(
    {
        "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2",
        "gpt_neox", "gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo2", "opt", "phi3", "qwen2", "qwen2_moe",
        "qwen3", "qwen3_moe", "smollm3", "starcoder2",
    }
)  # fmt: skip
"""Model types that every test run finds exact (docs/models.md)."""

_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.05}
_PLACE = 3
_NEIGHBOURS = (3, 11)
_TOKENS = (7, 23, 42)  # the smallest gap counts: rounding may send one of them to other experts


class _Alone:
    """Attention in which each token sees itself alone: its output is its value."""

    def run_layer(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See LayerHandler.run_layer."""
        return value.repeat_interleave(query.shape[0] // value.shape[0], dim=0).transpose(0, 1).contiguous()


def check_untried(network: Any, dtype: str) -> None:
    """Check the rows of a network whose model type is not among TRIED. Raises ConfigError."""
    if network.config.model_type not in TRIED:
        check_rows(network, dtype)


def check_rows(network: Any, dtype: str) -> None:
    """Raise ConfigError if a row's logits depend on its neighbours, or on where in the step it stands.

    `network` runs our attention, in `dtype`. Attention is taken out, so a state beside it shows: of a convolution, a
    recurrence, or positions counted from the start of the step.
    """
    assert network.config._attn_implementation == NAME
    attach(network, _Alone())
    gap = min(_gap(network, token_id) for token_id in _TOKENS)
    if not gap <= _TOLERANCE[dtype]:
        raise ConfigError(
            f"{network.config.model_type}: logits differ by {gap:.2g} of their size with another sequence in the step, "
            f"above {_TOLERANCE[dtype]}: its layers keep a state beside attention, which is not supported"
        )


def _gap(network: Any, token_id: int) -> float:
    """Return by how much of their size the token's logits differ with neighbours from those alone."""
    alone = _logits(network, [token_id])
    there = [_logits(network, [neighbour, token_id]) for neighbour in _NEIGHBOURS]
    return max(float((logits - alone).abs().max() / alone.abs().max()) for logits in there)


@torch.inference_mode()
def _logits(network: Any, token_ids: list[int]) -> torch.Tensor:
    """Return the last token's logits; that token is at the same place of its sequence in every call."""
    positions, place = [0] * (len(token_ids) - 1) + [_PLACE], next(iter(network.parameters())).device
    logits: torch.Tensor = network(
        input_ids=torch.tensor([token_ids]).to(place), position_ids=torch.tensor([positions]).to(place), use_cache=False
    ).logits
    return logits[0, -1].float()
