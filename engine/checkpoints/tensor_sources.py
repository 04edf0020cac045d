"""Map each tensor of a network to the stored tensors that form it, by transformers' names and conversions.

most tensors       | one stored tensor, under the same name or a renamed one
fused experts      | gate_up [experts, 2 x inner, hidden]: each expert's gate stacked, then each expert's up

Other conversions (interleaving, transposing, splitting) have no source here: transformers loads such a model.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from engine.checkpoints.weights import Weights


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Stored tensors that form one: `columns` are concatenated along dimension `dim`.

    `stacked`: a column is a stack of its stored tensors along a new first dimension, else its only tensor.
    """

    columns: tuple[tuple[str, ...], ...]
    dim: int = 0
    stacked: bool = False

    def shape(self, weights: Weights) -> tuple[int, ...]:
        """Return the shape of the result. Raises ValueError if the columns do not fit each other."""
        shapes = [self.column_shape(weights, column) for column in range(len(self.columns))]
        first, dim = shapes[0], self.dim
        if any(one[:dim] + one[dim + 1 :] != first[:dim] + first[dim + 1 :] for one in shapes):
            raise ValueError(f"{self.columns[0][0]}: shapes {shapes} do not fit each other")
        if len(shapes) == 1:
            return first
        return (*first[:dim], sum(one[dim] for one in shapes), *first[dim + 1 :])

    def column_shape(self, weights: Weights, column: int) -> tuple[int, ...]:
        """Return the shape of one column. Raises ValueError if its tensors' shapes differ."""
        names = self.columns[column]
        shapes = {weights.shape(name) for name in names}
        if len(shapes) != 1:
            raise ValueError(f"{names[0]} and similar tensors have shapes {sorted(shapes)}")
        (shape,) = shapes
        return (len(names), *shape) if self.stacked else shape


@dataclass(frozen=True, slots=True)
class Sources:
    """`by_name` covers the network's tensors that the checkpoint has; `converted` need transformers' conversion."""

    by_name: dict[str, TensorSource]
    converted: tuple[str, ...]


def find_sources(network: Any, weights: Weights) -> Sources:
    """Return the sources of the network's parameters and persistent buffers; unused stored tensors are left out."""
    mapping = get_model_conversion_mapping(network)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    wanted, prefix = network.state_dict(), network.base_model_prefix
    plain: dict[str, TensorSource] = {}
    parts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for stored in sorted(weights.names, key=dot_natural_key):
        name, pattern = rename_source_key(stored, renamings, converters, prefix, wanted)
        if name not in wanted and stored in wanted:
            name, pattern = stored, None
        if name in wanted and pattern is None:
            plain[name] = TensorSource(((stored,),))
        elif pattern is not None:
            parts[name][pattern].append(stored)
    return _with_converted(plain, parts, by_pattern)


def ignored_missing(network: Any, names: Sequence[str]) -> list[str]:
    """Return those of `names` that the model's class allows to be missing."""
    patterns = network._keys_to_ignore_on_load_missing or ()
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def _with_converted(
    plain: dict[str, TensorSource], parts: dict[str, dict[str, list[str]]], by_pattern: dict[str, Any]
) -> Sources:
    found, unknown = dict(plain), []
    for name, stored in parts.items():
        source = _merged(by_pattern[next(iter(stored))], stored)
        if source is None:
            unknown.append(name)
        else:
            found[name] = source
    return Sources(found, tuple(unknown))


def _merged(converter: Any, stored: dict[str, list[str]]) -> TensorSource | None:
    """Return the source of fused experts, None for any other conversion."""
    operations = converter.operations
    if [type(operation) for operation in operations] not in ([MergeModulelist], [MergeModulelist, Concatenate]):
        return None
    if operations[0].dim != 0 or any(pattern not in stored for pattern in converter.source_patterns):
        return None
    columns = tuple(tuple(stored[pattern]) for pattern in converter.source_patterns)
    return TensorSource(columns, operations[1].dim if len(operations) == 2 else 0, stacked=True)
