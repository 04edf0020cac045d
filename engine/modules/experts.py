"""Grouped mixtures of experts: two calls of an op that multiplies rows in groups compute all experts of a layer.

transformers selects how experts run from its experts interface; we register an implementation for a library's op. Rows
are sorted by expert, multiplied in groups, and put back in order. Each layer is compared with running one expert at a
time; if any layer differs, all keep transformers' implementation, or run one expert at a time if that cannot run here.
"""

import functools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.modules.trial import ROWS, TOLERANCE
from telemetry.logs import EventLogger

_log = EventLogger("engine")
_PLAIN = "eager"
"""One expert at a time: runs on every device."""


class GroupedOps(Protocol):
    """A library's grouped matrix product."""

    @property
    def name(self) -> str:
        """The library's name in logs."""
        ...

    @property
    def implementation(self) -> str:
        """Its name in the experts interface."""
        ...

    def unsupported(self, layer: Any) -> str | None:
        """Return why the library does not support this layer's experts, or None if it does."""
        ...

    def multiply(self, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Multiply each row by its expert's weight: rows [rows, inputs], sorted by expert, give [rows, outputs].

        weight: [num_experts, inputs, outputs], which may be a transposed view; ends: [num_experts] int64, where each
        expert's rows end.
        """
        ...


def use_grouped_experts(network: Any, ops: GroupedOps) -> tuple[str, ...]:
    """Let the experts of `network` run in groups; return a line for the log, or nothing if there are no experts."""
    layers = [*_layers(network)]
    if not layers:
        return ()
    ALL_EXPERTS_FUNCTIONS.register(ops.implementation, functools.partial(run_experts, ops=ops))
    before = network.get_experts_implementation()
    why = next((why for why in map(ops.unsupported, layers) if why), None)
    if why is None:
        network.set_experts_implementation(_PLAIN)
        expected = [_trial_output(layer) for layer in layers]
        network.set_experts_implementation(ops.implementation)
        why = next((why for why in map(_find_difference, layers, expected) if why), None)
    if why is None:
        return (f"by {ops.name}: the experts of {len(layers)} layer{'s' * (len(layers) != 1)}",)
    network.set_experts_implementation(before)
    if not _can_run(layers[0]):
        network.set_experts_implementation(_PLAIN)
    _log.warning("experts_not_replaced", module=type(layers[0]).__name__, reason=why)
    return (f"experts unchanged: {why}",)


def run_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, *, ops: GroupedOps
) -> torch.Tensor:
    """Return [num_tokens, hidden]; `top_k_index` and `top_k_weights` are [num_tokens, top_k].

    `self` is a layer's experts, as transformers' use_experts_implementation makes them.
    """
    num_tokens, top_k = top_k_index.shape
    experts, order = torch.sort(top_k_index.reshape(-1))  # [num_tokens * top_k], like all tensors below
    counts = torch.zeros(self.num_experts, dtype=torch.int64, device=experts.device)
    ends = counts.scatter_add_(0, experts.long(), torch.ones_like(experts, dtype=torch.int64)).cumsum(0)

    def multiply(name: str, rows: torch.Tensor) -> torch.Tensor:
        weight = getattr(self, name)
        made = ops.multiply(rows, weight if self.is_transposed else weight.transpose(1, 2), ends)
        return made + getattr(self, f"{name}_bias")[experts] if self.has_bias else made

    rows = multiply("gate_up_proj" if self.has_gate else "up_proj", hidden_states[order // top_k])
    rows = multiply("down_proj", self._apply_gate(rows) if self.has_gate else self.act_fn(rows))
    if self.has_post_expert_norm:
        rows = self.post_expert_norm(rows)
    weighted = rows * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return weighted[back].view(num_tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)


def _layers(network: Any) -> Iterator[nn.Module]:
    """Yield the experts of each layer that uses the experts interface."""
    return (module for module in network.modules() if is_layer_of_experts(module))


def is_layer_of_experts(module: Any) -> bool:
    """Return whether a module is a layer's experts and uses the experts interface, and its weights are floats."""
    marks = ("_apply_gate", "has_gate", "is_transposed", "num_experts", "down_proj")
    return all(hasattr(module, mark) for mark in marks) and isinstance(module.down_proj, torch.Tensor)


@torch.inference_mode()
def _trial_output(layer: Any) -> torch.Tensor:
    """Return the layer's output for random rows, each routed to two experts, or to the only one."""
    numbers = torch.Generator().manual_seed(0)
    weight, top_k = layer.down_proj, min(2, layer.num_experts)
    width = weight.shape[2] if layer.is_transposed else weight.shape[1]
    rows = torch.randn(ROWS, width, generator=numbers).to(weight.device, weight.dtype)
    chosen = torch.rand(ROWS, layer.num_experts, generator=numbers).topk(top_k).indices.to(weight.device)
    shares = torch.rand(ROWS, top_k, generator=numbers).to(weight.device, weight.dtype)
    made: torch.Tensor = layer(rows, chosen, shares)
    return made.float()


def _can_run(layer: Any) -> bool:
    try:
        _trial_output(layer)
    except RuntimeError:  # transformers chose an implementation for other devices
        return False
    return True


def _find_difference(layer: Any, expected: torch.Tensor) -> str | None:
    """Describe how the layer differs from the expected output; None if it does not."""
    try:
        got = _trial_output(layer)
    except RuntimeError as error:
        return f"the grouped call failed: {' '.join(str(error).split())}"
    difference, limit = float((got - expected).norm() / expected.norm()), TOLERANCE[layer.down_proj.dtype]
    if difference <= limit:  # false for NaN too
        return None
    return f"the grouped result differs by {difference:.2g} of the norm, but the limit is {limit:.2g}"
