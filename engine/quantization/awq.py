"""AWQ in its GEMM layout: 4 bits, packed along outputs, eight per word in AWQ's interleaved order.

    qweight [inputs, outputs / 8] int32   qzeros [groups, outputs / 8] int32   scales [groups, outputs] float

Nibble i of word c is output 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]; zeros are stored without an offset.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.checkpoints.weights import Weights
from engine.quantization.arithmetic import Matrix
from engine.quantization.bits import covering
from engine.quantization.interface import EvenGroups, Grouped, QuantisedTensor, read_region
from engine.quantization.parts import packed_shapes
from wire.errors import ConfigError

BITS = 4
_PER_WORD = 8
_NIBBLE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class AwqLayout:
    """The AWQ settings of config.json; a group size of -1 means one group."""

    group_size: int
    name: str = "AWQ 4-bit"
    rounds_inputs: bool = False
    rounded_inputs: torch.dtype | None = None
    has_static_inputs: bool = False
    adds_biases: bool = False
    companions: frozenset[str] = frozenset({"qweight", "qzeros", "scales"})
    dropped: frozenset[str] = frozenset()

    def tensors(self, stored: Weights) -> Iterator[tuple[str, QuantisedTensor]]:
        """Yield the weight of each module that has a qweight. Raises ConfigError if activations have scales."""
        names = frozenset(stored.names)
        for name in stored.names:
            module, _, tensor = name.rpartition(".")
            if tensor == "qweight":
                yield f"{module}.weight", Matrix(self._module(stored, module))
            elif tensor == "scales" and f"{module}.qweight" not in names:
                raise ConfigError(f"{name}: AWQ scales of an activation are not supported")

    def _module(self, stored: Weights, module: str) -> "AwqModule":
        shapes = packed_shapes(stored, module)
        inputs, num_words = shapes["qweight"]
        size = inputs if self.group_size < 1 else self.group_size
        num_groups = -(-inputs // size)
        if shapes["qzeros"] != (num_groups, num_words) or shapes["scales"] != (num_groups, num_words * _PER_WORD):
            raise ConfigError(
                f"{module}: qweight {shapes['qweight']}, qzeros {shapes['qzeros']} and scales {shapes['scales']} "
                f"are not AWQ's GEMM layout with group size {self.group_size}"
            )
        return AwqModule(stored, module, (num_words * _PER_WORD, inputs), size)


@dataclass(frozen=True, slots=True)
class AwqModule:
    """One AWQ layer."""

    stored: Weights
    name: str
    shape: tuple[int, int]
    group_size: int

    def read(self, rows: range, columns: range) -> Grouped:
        """Read the codes of outputs `rows` and inputs `columns`, and the scales and zeros of their groups."""
        span = range(columns.start // self.group_size, -(-columns.stop // self.group_size))
        groups = EvenGroups(self.group_size, columns.start % self.group_size)
        scales = read_region(self.stored, f"{self.name}.scales", span, rows).t()
        return Grouped(self._codes("qweight", columns, rows), scales, self._codes("qzeros", span, rows), groups)

    def _codes(self, tensor: str, first: range, outputs: range) -> torch.Tensor:
        """Return the codes at rows `first` and `outputs` of a tensor packed along outputs: [outputs, first] uint8."""
        words, inside = covering(outputs, BITS)
        packed = read_region(self.stored, f"{self.name}.{tensor}", first, words).t().contiguous()
        codes = torch.stack([(packed >> BITS * nibble).to(torch.uint8) & 15 for nibble in _NIBBLE_OF_OUTPUT], dim=1)
        return codes.flatten(0, 1)[inside.start : inside.stop]
