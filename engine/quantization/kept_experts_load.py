"""Replace the weights of a network's experts by codes while it is loaded.

    gate_up_proj [experts, 2 x inner, hidden]   each expert's gate and up, two stored layers
    down_proj [experts, hidden, inner]          one

A rank's cut of the parameter is a cut of each expert's layers (kept_cut.py).
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from engine.checkpoints.materialise import DimensionRanges
from engine.checkpoints.tensor_sources import TensorSource
from engine.modules.experts import is_layer_of_experts, run_experts
from engine.quantization.compact import CompactWeights, compact_experts, grouped_of, joined
from engine.quantization.interface import QuantisedModule
from engine.quantization.kept import KeptWeight, kept_weight
from engine.quantization.kept_check import disagreement
from engine.quantization.kept_cut import read_cut
from engine.quantization.kept_experts import ByCodes, ExpertsFormat, KeptExperts
from engine.quantization.mxfp4 import HALVES


class StoredModules(Protocol):
    """The quantised modules of a checkpoint, by the names of their weights."""

    def module(self, name: str) -> QuantisedModule | None:
        """Return the quantised linear layer of this name, None for other weights."""
        ...

    def experts(self, name: str) -> tuple[QuantisedModule, ...]:
        """Return each expert's weight if one tensor holds all experts of a layer, else nothing."""
        ...


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """A parameter of a layer of experts; `columns` has, for each of its parts, the stored layer of every expert.

    Parts are concatenated along `dim` of the parameter. `num_layers` counts the stored weights. `values` as in
    compact_experts.
    """

    name: str
    parameter: torch.Tensor
    columns: tuple[tuple[QuantisedModule, ...], ...]
    dim: int
    num_layers: int
    is_transposed: bool = False
    values: tuple[int, ...] | None = None

    def read(
        self, number: int, cut: DimensionRanges | None, rounded_inputs: torch.dtype | None
    ) -> KeptWeight | str:  # fmt: skip
        """Read the cut of one expert's weight, or return the reason why no kernel can use it."""
        modules = [column[number] for column in self.columns]
        if cut is not None and self.is_transposed:
            cut = DimensionRanges(3 - cut.dim, cut.ranges)
        cuts = _cuts_of_parts(cut, self.dim, [module.shape for module in modules])
        parts = (read_cut(module, own) for module, own in zip(modules, cuts, strict=True))
        weight = joined(kept_weight(part, rounded_inputs=rounded_inputs) for part in parts)
        return weight if isinstance(weight, str) or self.values is None else replace(weight, num_bits=4)


@dataclass(frozen=True, slots=True)
class LayerOfExperts:
    """A layer whose experts are all quantised."""

    path: str
    layer: Any
    stored: tuple[StoredExperts, ...]

    @property
    def num_layers(self) -> int:
        """Stored layers of all its experts."""
        return sum(one.num_layers for one in self.stored)

    @property
    def float_bytes(self) -> int:
        """Bytes of its weights in floats."""
        return sum(one.parameter.nbytes for one in self.stored)

    def keep(self, made: Sequence[KeptExperts]) -> None:
        """Let the layer compute with the codes; it keeps its hooks, biases and gate."""
        for stored, experts in zip(self.stored, made, strict=True):
            delattr(self.layer, stored.name)
            setattr(self.layer, stored.name, experts)
        self.layer.is_transposed = True  # multiply gets the weight as it is
        self.layer.forward = functools.partial(run_experts, self.layer, ops=ByCodes())
        self.layer._is_hf_initialized = True


def find_experts(
    network: Any, sources: Mapping[str, TensorSource], modules: StoredModules
) -> Iterator[LayerOfExperts]:  # fmt: skip
    """Yield the layers of experts whose weights are all stored quantised."""
    for path, layer in network.named_modules():
        if is_layer_of_experts(layer):
            names = ("gate_up_proj" if layer.has_gate else "up_proj", "down_proj")
            found = [_stored(layer, name, sources.get(f"{path}.{name}"), modules) for name in names]
            if all(found):
                yield LayerOfExperts(path, layer, tuple(one for one in found if one is not None))


def keep_experts(
    experts: LayerOfExperts, cuts: Mapping[str, DimensionRanges], formats: Sequence[ExpertsFormat],
    rounded_inputs: torch.dtype | None, device: torch.device, advance: Callable[[int], None],
) -> list[KeptExperts] | str:  # fmt: skip
    """Replace the weights of a layer by codes; return the codes, or the reason why the weights are not replaced."""
    made = []
    for stored in experts.stored:
        one = _make(stored, cuts.get(f"{experts.path}.{stored.name}"), formats, rounded_inputs, device, advance)
        if isinstance(one, str):
            return one
        made.append(one)
    experts.keep(made)
    return made


def choose_format(
    weights: CompactWeights, checked: Mapping[int, KeptWeight], formats: Sequence[ExpertsFormat],
    rounded_inputs: torch.dtype | None, dtype: torch.dtype,
) -> KeptExperts | str:  # fmt: skip
    """Return the experts in the first format that agrees with `checked` (weights by expert), or why none does."""
    reasons = []
    for form in (form for form in formats if form.handles(weights, rounded_inputs)):
        lacking = form.lacking(weights, dtype)
        if lacking is None:
            try:
                made = KeptExperts(form.pack(weights, dtype), rounds_inputs=form.rounds_inputs)
                lacking = _disagreement(made, weights, checked, form, dtype)
            except (RuntimeError, ValueError) as error:  # the device's op refused it
                lacking = str(error).partition("\n")[0]
            if lacking is None:
                return made
        reasons.append(lacking)
    return "; ".join(reasons) or "there is no kernel for experts on this device"


def _stored(layer: Any, name: str, source: TensorSource | None, modules: StoredModules) -> StoredExperts | None:
    """Return the stored weights of one parameter, None where they are not quantised."""
    parameter = getattr(layer, name)
    if source is None:
        return None
    if not source.stacked:  # one tensor for all experts
        experts = modules.experts(source.columns[0][0])
        if not layer.is_transposed or len(source.columns) > 1 or len(experts) != len(parameter):
            return None
        return StoredExperts(name, parameter, (experts,), 0, 1, is_transposed=True, values=HALVES)
    if layer.is_transposed or (len(source.columns) > 1 and source.dim == 0):
        return None
    found = [[modules.module(stored) for stored in column] for column in source.columns]
    columns = tuple(tuple(module for module in column if module is not None) for column in found)
    if any(len(column) != len(parameter) for column in columns):
        return None
    return StoredExperts(name, parameter, columns, source.dim, sum(map(len, columns)))


def _make(
    stored: StoredExperts, cut: DimensionRanges | None, formats: Sequence[ExpertsFormat],
    rounded_inputs: torch.dtype | None, device: torch.device, advance: Callable[[int], None],
) -> KeptExperts | str:  # fmt: skip
    num_experts, dtype = len(stored.parameter), stored.parameter.dtype

    def read() -> Iterator[KeptWeight | str]:
        for number in range(num_experts):
            yield stored.read(number, cut, rounded_inputs)
            advance(stored.parameter.nbytes // num_experts)

    weights = compact_experts(read(), num_experts, device, stored.values)
    if isinstance(weights, str):
        return weights
    again = {number: stored.read(number, cut, rounded_inputs) for number in {0, num_experts - 1}}
    checked = {number: one for number, one in again.items() if isinstance(one, KeptWeight)}
    return choose_format(weights, checked, formats, rounded_inputs, dtype)


def _disagreement(
    made: KeptExperts, weights: CompactWeights, checked: Mapping[int, KeptWeight], form: ExpertsFormat,
    dtype: torch.dtype,
) -> str | None:  # fmt: skip
    """Describe how far the first or last expert is from its dequantised weight; see kept_check.py."""
    num_experts, _, inputs = weights.shape
    for number, weight in sorted(checked.items()):
        moved = weight.to(weights.codes.device)
        why = disagreement(
            _OneExpert(made, number, num_experts, inputs), grouped_of(moved), moved, form, dtype
        )  # fmt: skip
        if why is not None:
            return f"expert {number}: {why}"
    return None


@dataclass(frozen=True, slots=True)
class _OneExpert:
    """Multiplies rows by one expert only: once with fewer rows than experts, once with more."""

    experts: KeptExperts
    number: int
    num_experts: int
    in_features: int

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [num_rows, outputs]; many rows (kept_check.py) are repeated until there are more than experts."""
        times = 1 if len(rows) < _MANY else self.num_experts // len(rows) + 1
        ends = torch.full((self.num_experts,), times * len(rows), dtype=torch.int64, device=rows.device)
        ends[: self.number] = 0
        made: torch.Tensor = self.experts(rows.repeat(times, 1), ends)
        return made[-len(rows) :]


_MANY = 64


def _cuts_of_parts(
    cut: DimensionRanges | None, dim: int, shapes: Sequence[tuple[int, int]]
) -> Iterator[DimensionRanges | None]:  # fmt: skip
    """Yield the cut of each part of an expert's weight; `cut` is of the parameter, whose first dimension is experts."""
    first = 0
    for shape in shapes:
        if cut is None or cut.dim != dim or len(shapes) == 1:
            yield None if cut is None else DimensionRanges(cut.dim - 1, cut.ranges)
            continue
        last = first + shape[dim - 1]
        held = [(max(start, first) - first, min(end, last) - first) for start, end in cut.ranges]
        yield DimensionRanges(dim - 1, tuple(one for one in held if one[0] < one[1]))
        first = last
