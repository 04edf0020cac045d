"""Replaces a network's linear layers by quantised ones while it is loaded, and counts the results."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
from engine.quantization.weights import DequantisingWeights


class Keeper:
    """Keeps the layers quantised for which the device has a format; called once, for one network.

    `kept` of `weights.num_quantised` layers stay quantised and take `kept_bytes`, in floats they would take
    `float_bytes`, and the whole network `network_bytes`; `reasons` counts why the others were dequantised. `is_cut`:
    the network is one rank's, and so are all these bytes.
    """

    def __init__(
        self, weights: DequantisingWeights, formats: Sequence[KeptFormat], *, rounded_inputs: torch.dtype | None,
        prefix: str = "",
    ) -> None:  # fmt: skip
        """`prefix` is prepended to the stored names where the network's names differ from them."""
        self._weights, self._formats = weights, tuple(formats)
        self._rounded_inputs, self._prefix = rounded_inputs, prefix
        self.kept = self.kept_bytes = self.float_bytes = self.network_bytes = 0
        self.reasons: Counter[str] = Counter()
        self.was_requested = self.is_cut = False

    @torch.no_grad()
    def __call__(
        self, network: Any, sources: Mapping[str, TensorSource], cuts: Mapping[str, DimensionRanges],
        device: torch.device,
    ) -> None:  # fmt: skip
        """Replace linear layers of a network on the meta device; its other tensors are filled afterwards."""
        self.was_requested, self.is_cut = True, bool(cuts)
        tensors = {id(tensor): tensor.nbytes for tensor in network.state_dict(keep_vars=True).values()}
        self.network_bytes = sum(tensors.values())
        found = [*self._linears(network, sources)]
        with LoadProgress(sum(linear.weight.nbytes for _, linear, _ in found)) as progress:
            for name, linear, module in found:
                made = self._keep(linear, module, cuts.get(f"{name}.weight"), device)
                progress.advance(linear.weight.nbytes)
                if isinstance(made, str):
                    self.reasons[made] += 1
                    continue
                parent, _, last = name.rpartition(".")
                setattr(network.get_submodule(parent), last, made)
                self.kept, self.kept_bytes = self.kept + 1, self.kept_bytes + made.num_bytes
                self.float_bytes += linear.weight.nbytes

    def _linears(
        self, network: Any, sources: Mapping[str, TensorSource]
    ) -> Iterator[tuple[str, nn.Linear, QuantisedModule]]:  # fmt: skip
        """Yield the linear layers whose weight is one stored quantised tensor, not shared with another layer."""
        users = Counter(id(tensor) for tensor in network.state_dict(keep_vars=True).values())
        for name, linear in [*network.named_modules()]:
            source = sources.get(f"{name}.weight")
            if type(linear) is not nn.Linear or source is None or source.stacked or len(source.columns) > 1:
                continue
            module = self._weights.module(source.columns[0][0].removeprefix(self._prefix))
            if module is not None and users[id(linear.weight)] == 1:
                yield name, linear, module

    def _keep(
        self, linear: nn.Linear, module: QuantisedModule, cut: DimensionRanges | None, device: torch.device
    ) -> KeptLinear | str:
        """Return the quantised layer that replaces `linear`, or the reason why there is none."""
        dtype = linear.weight.dtype
        stored = read_cut(module, cut)
        weight = kept_weight(stored, rounded_inputs=self._rounded_inputs)
        if isinstance(weight, str):
            return weight
        grouped, weight = _moved(stored, device), weight.to(device)
        reasons = []
        for form in (form for form in self._formats if form.takes(weight)):
            lacking = form.lacking(weight, dtype)
            if lacking is None:
                try:
                    made = KeptLinear(linear, form.pack(weight, dtype), weight.order)
                    lacking = disagreement(made, grouped, weight, form, dtype)
                except RuntimeError as error:  # the device's op refused it
                    lacking = str(error).partition("\n")[0]
                if lacking is None:
                    return made
            reasons.append(lacking)
        if not reasons:
            return f"there is no kernel for {weight.code_type} here"
        return "; ".join(reasons) + _divided(stored, weight)


def _divided(stored: Grouped, weight: KeptWeight) -> str:
    """Return what to add to a kernel's reason where the weight's groups are smaller than the stored ones."""
    size = stored.groups.size if isinstance(stored.groups, EvenGroups) else 0
    return f" (groups of {size}, divided)" if weight.group_size < min(size, weight.shape[1]) else ""


def _moved(grouped: Grouped, device: torch.device) -> Grouped:
    zeros, groups = grouped.zeros, grouped.groups
    return replace(
        grouped, codes=grouped.codes.to(device), scales=grouped.scales.to(device),
        zeros=None if zeros is None else zeros.to(device),
        groups=groups.to(device) if isinstance(groups, torch.Tensor) else groups,
    )  # fmt: skip
