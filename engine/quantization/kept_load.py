"""Replaces a network's linear layers and experts by quantised ones while it is loaded, and counts the results."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from engine.checkpoints.load_progress import LoadProgress
from engine.checkpoints.materialise import DimensionRanges
from engine.checkpoints.tensor_sources import TensorSource
from engine.quantization.interface import EvenGroups, Grouped, QuantisedModule
from engine.quantization.kept import KeptFormat, KeptLinear, KeptWeight, kept_weight
from engine.quantization.kept_check import disagreement
from engine.quantization.kept_cut import read_cut
from engine.quantization.kept_experts import ExpertsFormat, KeptExperts
from engine.quantization.kept_experts_load import find_experts, keep_experts
from engine.quantization.weights import DequantisingWeights


class Keeper:
    """Keeps quantised those layers for which the device has a format. Called once, for one network.

    `kept` of `weights.num_quantised` layers stay quantised (those of each expert are counted) and use `kept_bytes`; in
    floats they would use `float_bytes`, and the whole network `network_bytes`. `num_rounded` of them round their
    inputs, `num_static` of these with a stored step. `reasons` counts why the others were dequantised. `is_cut`: the
    network is one rank's, and so are all these bytes.
    """

    def __init__(
        self, weights: DequantisingWeights, formats: Sequence[KeptFormat], experts: Sequence[ExpertsFormat], *,
        rounded_inputs: torch.dtype | None, prefix: str = "",
    ) -> None:  # fmt: skip
        """`prefix` is prepended to the stored names where the network's names differ from them."""
        self._weights, self._formats, self._experts = weights, tuple(formats), tuple(experts)
        self._rounded_inputs, self._prefix = rounded_inputs, prefix
        self.kept = self.num_rounded = self.num_static = 0
        self.kept_bytes = self.float_bytes = self.network_bytes = 0
        self.reasons: Counter[str] = Counter()
        self.was_requested = self.is_cut = False

    @torch.no_grad()
    def __call__(
        self, network: Any, sources: Mapping[str, TensorSource], cuts: Mapping[str, DimensionRanges],
        device: torch.device,
    ) -> None:  # fmt: skip
        """Replace layers of a network on the meta device; its other tensors are filled afterwards."""
        self.was_requested, self.is_cut = True, bool(cuts)
        tensors = {id(tensor): tensor.nbytes for tensor in network.state_dict(keep_vars=True).values()}
        self.network_bytes = sum(tensors.values())
        found = [*self._linears(network, sources)]
        experts = [*find_experts(network, sources, self)] if self._experts else []
        total = sum(linear.weight.nbytes for _, linear, _ in found) + sum(layer.float_bytes for layer in experts)
        with LoadProgress(total) as progress:
            for name, linear, module in found:
                made = self._keep(linear, module, cuts.get(f"{name}.weight"), device)
                progress.advance(linear.weight.nbytes)
                if isinstance(made, str):
                    self.reasons[made] += 1
                    continue
                parent, _, last = name.rpartition(".")
                setattr(network.get_submodule(parent), last, made)
                self._count(made, 1, linear.weight.nbytes)
            for layer in experts:
                kept = keep_experts(layer, cuts, self._experts, self._rounded_inputs, device, progress.advance)
                if isinstance(kept, str):
                    self.reasons[kept] += layer.num_layers
                    continue
                for stored, one in zip(layer.stored, kept, strict=True):
                    self._count(one, stored.num_layers, stored.parameter.nbytes)

    def _count(self, made: KeptLinear | KeptExperts, num_layers: int, float_bytes: int) -> None:
        self.kept, self.kept_bytes = self.kept + num_layers, self.kept_bytes + made.num_bytes
        self.num_rounded += num_layers if made.rounds_inputs else 0
        self.float_bytes += float_bytes

    def _linears(
        self, network: Any, sources: Mapping[str, TensorSource]
    ) -> Iterator[tuple[str, nn.Linear, QuantisedModule]]:  # fmt: skip
        """Yield the linear layers whose weight is one stored quantised tensor, not shared with another layer."""
        users = Counter(id(tensor) for tensor in network.state_dict(keep_vars=True).values())
        for name, linear in [*network.named_modules()]:
            source = sources.get(f"{name}.weight")
            if type(linear) is not nn.Linear or source is None or source.stacked or len(source.columns) > 1:
                continue
            module = self.module(source.columns[0][0])
            if module is not None and users[id(linear.weight)] == 1:
                yield name, linear, module

    def module(self, name: str) -> QuantisedModule | None:
        """See StoredModules."""
        return self._weights.module(name.removeprefix(self._prefix))

    def experts(self, name: str) -> tuple[QuantisedModule, ...]:
        """See StoredModules."""
        return self._weights.experts(name.removeprefix(self._prefix))

    def _keep(
        self, linear: nn.Linear, module: QuantisedModule, cut: DimensionRanges | None, device: torch.device
    ) -> KeptLinear | str:
        """Return the quantised layer that replaces `linear`, or the reason why there is none."""
        dtype = linear.weight.dtype
        stored = read_cut(module, cut)
        weight = kept_weight(stored, rounded_inputs=self._rounded_inputs)
        if isinstance(weight, str):
            return weight
        grouped, weight = stored.to(device), weight.to(device)
        reasons = []
        for form in (form for form in self._formats if form.handles(weight)):
            lacking = form.lacking(weight, dtype)
            if lacking is None:
                try:
                    made = KeptLinear(
                        linear, form.pack(weight, dtype), weight.order, rounds_inputs=form.rounds_inputs
                    )  # fmt: skip
                    lacking = disagreement(made, grouped, weight, form, dtype)
                except (RuntimeError, ValueError) as error:  # the device's op refused it
                    lacking = str(error).partition("\n")[0]
                if lacking is None:
                    if weight.static is not None:
                        self.num_static, made.bias = self.num_static + 1, None  # the kernel adds it
                    return made
            reasons.append(lacking)
        if not reasons:
            return f"there is no kernel for {weight.code_type} on this device"
        return "; ".join(reasons) + _divided(stored, weight)


def _divided(stored: Grouped, weight: KeptWeight) -> str:
    """Return what to add to a kernel's reason where the weight's groups are smaller than the stored ones."""
    size = stored.groups.size if isinstance(stored.groups, EvenGroups) else 0
    return (
        f" (stored groups of {size} were divided to fit this rank's cut)"
        if weight.group_size < min(size, weight.shape[1])
        else ""
    )
