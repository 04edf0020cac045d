"""Is a part by NPU ops the original? Both run on the same random rows; attention answers with a sum of its inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from engine.attention.interface import AttentionOptions
from engine.attention.registered import attach

_ROWS = 19
_TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of the difference's norm over that of what the part makes of its rows."""


class PartCheck:
    """Runs modules of `network` on random rows, with an attention of its own while it lives."""

    def __init__(self, network: Any) -> None:
        self._attention = _SumAttention()
        attach(network, self._attention)
        self._network = network

    @torch.inference_mode()
    def differs(self, module: nn.Module, part: Callable[..., Any]) -> str | None:
        """Return how `part` differs from `module`, in words, or None."""
        inputs = self._inputs(module)
        rows = inputs["hidden_states"]
        try:
            expected, asked = self._run(module, inputs)
            got, ours = self._run(part, inputs)
        except RuntimeError as error:
            return f"it cannot be tried: {' '.join(str(error).split())}"
        if asked != ours:
            return f"it asks its attention for {ours}, the original for {asked}"
        made = expected - rows if hasattr(module, "self_attn") else expected  # a layer hands its rows through
        difference, limit = float((got - expected).norm() / made.norm()), _TOLERANCE[rows.dtype]
        if difference <= limit:  # false for NaN too
            return None
        return f"it differs by {difference:.2g} of the norm, {limit:.2g} is allowed"

    @torch.inference_mode()
    def options_of(self, module: nn.Module) -> AttentionOptions | None:
        """Return what a module of attention asks for; None where it cannot be tried."""
        try:
            _, asked = self._run(module, self._inputs(module))
        except (RuntimeError, TypeError):  # of another kind: it wants other inputs
            return None
        return asked[0] if len(asked) == 1 else None

    def _run(self, run: Callable[..., Any], inputs: dict[str, Any]) -> tuple[torch.Tensor, list[AttentionOptions]]:
        self._attention.asked = []
        copies = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        hidden_states = copies.pop("hidden_states")
        made = run(hidden_states, **copies)
        output: torch.Tensor = made[0] if isinstance(made, tuple) else made
        return output.float(), self._attention.asked

    def _inputs(self, module: nn.Module) -> dict[str, Any]:
        """Return what `module` takes: rows, and for those with attention in them the angles too."""
        numbers, weight = torch.Generator().manual_seed(0), self._network.get_input_embeddings().weight

        def some(width: int) -> torch.Tensor:
            return torch.randn(1, _ROWS, width, generator=numbers).to(weight.device, weight.dtype)

        attention: Any = getattr(module, "self_attn", module)
        if not hasattr(attention, "q_proj"):
            return {"hidden_states": some(_width(module))}
        angles = some(attention.head_dim), some(attention.head_dim)
        return {
            "hidden_states": some(self._network.config.get_text_config().hidden_size), "position_embeddings": angles,
            "attention_mask": None, "position_ids": torch.arange(_ROWS, device=weight.device)[None],
        }  # fmt: skip


class _SumAttention:
    """Implements LayerHandler: mixes query, key and value of each token alone; notes what was asked."""

    def __init__(self) -> None:
        self.asked: list[AttentionOptions] = []

    def run_layer(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See LayerHandler."""
        self.asked.append(options)
        group = query.shape[0] // key.shape[0]
        keys, values = (rows.repeat_interleave(group, dim=0) for rows in (key, value))
        score = (query * keys).sum(-1, keepdim=True) / query.shape[-1]
        return (values + score).transpose(0, 1)


def _width(module: Any) -> int:
    """Return how wide the rows are that a module takes."""
    if hasattr(module, "gate_proj"):
        return int(module.gate_proj.in_features)
    if hasattr(module, "in_features"):  # quantised layers have no weight
        return int(module.in_features)
    return int(module.weight.shape[-1])
