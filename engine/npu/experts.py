"""Mixtures of experts on an NPU: all experts of a layer by two calls of npu_grouped_matmul.

transformers asks its experts interface how a layer's experts run; we register one way more. Rows are sorted by expert,
multiplied in groups, and put back. Each layer is compared with one expert after the other; where one differs, all stay.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from telemetry.logs import EventLogger

NAME = "pdserve_npu_grouped"
_log = EventLogger("engine")
_INNER_LIMIT, _MAX_EXPERTS = 65_536, 1024
_BY_ROWS, _ONE_RESULT, _ENDS = 0, 3, 0  # group_type, split_item and group_list_type of the op
_ROWS = 19
_TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of the difference's norm over that of what the experts make of their rows."""


def use_grouped_experts(network: Any) -> tuple[str, ...]:
    """Let the experts of `network` run in groups; return a line on it for people, none where it has no experts."""
    layers = [*_layers(network)]
    if not layers:
        return ()
    ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)
    before = network.get_experts_implementation()
    why = next((why for why in map(_beyond, layers) if why), None)
    if why is None:
        network.set_experts_implementation("eager")  # one expert after the other: runs everywhere
        expected = [_tried(layer) for layer in layers]
        network.set_experts_implementation(NAME)
        why = next((why for why in map(_differs, layers, expected) if why), None)
    if why is None:
        return (f"by NPU ops: the experts of {len(layers)} layers",)
    network.set_experts_implementation(before)
    _log.warning("npu_experts_stay", module=type(layers[0]).__name__, reason=why)
    return (f"experts as they were: {why}",)


def run_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return [num_tokens, hidden]; `top_k_index` and `top_k_weights` are [num_tokens, top_k].

    `self` is a layer's experts, as transformers' use_experts_implementation makes them.
    """
    num_tokens, top_k = top_k_index.shape
    experts, order = torch.sort(top_k_index.reshape(-1))  # [num_tokens * top_k], as all that follows
    counts = torch.zeros(self.num_experts, dtype=torch.int64, device=experts.device)
    ends = counts.scatter_add_(0, experts.long(), torch.ones_like(experts, dtype=torch.int64)).cumsum(0)
    rows = hidden_states[order // top_k]
    rows = _multiply(self, "gate_up_proj" if self.has_gate else "up_proj", rows, experts, ends)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _multiply(self, "down_proj", rows, experts, ends)
    if self.has_post_expert_norm:
        rows = self.post_expert_norm(rows)
    weighted = rows * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return weighted[back].view(num_tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)


def _multiply(layer: Any, name: str, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return rows, sorted by expert, times each its expert's weight."""
    weight = getattr(layer, name)
    weight = weight if layer.is_transposed else weight.transpose(1, 2)  # [num_experts, inputs, outputs]
    made: torch.Tensor = torch.ops.npu.npu_grouped_matmul(
        [rows], [weight], group_list=ends, split_item=_ONE_RESULT, group_type=_BY_ROWS, group_list_type=_ENDS
    )[0]
    return made + getattr(layer, f"{name}_bias")[experts] if layer.has_bias else made


def _layers(network: Any) -> Iterator[nn.Module]:
    """Yield the experts of each layer that asks the interface how to run them."""
    marks = ("_apply_gate", "has_gate", "is_transposed", "num_experts", "down_proj")
    return (module for module in network.modules() if all(hasattr(module, mark) for mark in marks))


def _beyond(layer: Any) -> str | None:
    """Return why the op does not take such experts, in words, or None."""
    if layer.num_experts > _MAX_EXPERTS:
        return f"{layer.num_experts} experts: npu_grouped_matmul takes {_MAX_EXPERTS} at most"
    width = max(layer.down_proj.shape[1:])
    if width >= _INNER_LIMIT:
        return f"experts of {width} columns: npu_grouped_matmul takes fewer than {_INNER_LIMIT}"
    return None


@torch.inference_mode()
def _tried(layer: Any) -> torch.Tensor:
    """Return what the layer makes of random rows, of which each goes to two experts, or to the only one."""
    numbers = torch.Generator().manual_seed(0)
    weight, top_k = layer.down_proj, min(2, layer.num_experts)
    width = weight.shape[2] if layer.is_transposed else weight.shape[1]
    rows = torch.randn(_ROWS, width, generator=numbers).to(weight.device, weight.dtype)
    chosen = torch.rand(_ROWS, layer.num_experts, generator=numbers).topk(top_k).indices.to(weight.device)
    shares = torch.rand(_ROWS, top_k, generator=numbers).to(weight.device, weight.dtype)
    made: torch.Tensor = layer(rows, chosen, shares)
    return made.float()


def _differs(layer: Any, expected: torch.Tensor) -> str | None:
    """Return how the layer differs from what was expected of it, in words, or None."""
    try:
        got = _tried(layer)
    except RuntimeError as error:
        return f"they cannot be tried in groups: {' '.join(str(error).split())}"
    difference, limit = float((got - expected).norm() / expected.norm()), _TOLERANCE[layer.down_proj.dtype]
    if difference <= limit:  # false for NaN too
        return None
    return f"in groups they differ by {difference:.2g} of the norm, {limit:.2g} is allowed"
