"""GPTQ: qweight packed along inputs, qzeros along outputs, scales and g_idx by group; formats `gptq` and `gptq_v2`.

    qweight [inputs * b / 32, outputs] int32     qzeros [groups, outputs * b / 32] int32
    scales  [groups, outputs] float              g_idx  [inputs] int32, the group of each input (act order)

Format `gptq` stores each zero minus 1, modulo 2^b; `gptq_v2` stores it unchanged. A group size of -1 is one group.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.checkpoints.weights import Weights
from engine.quantization.arithmetic import Matrix
from engine.quantization.bits import WORD_BITS, covering, fields_per_period, unpack
from engine.quantization.interface import EvenGroups, Grouped, QuantisedTensor, read_region
from engine.quantization.parts import packed_shapes, part_shape, read_groups
from wire.errors import ConfigError

SUPPORTED_BITS = (2, 3, 4, 8)
_MARK = ".qweight"


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """The GPTQ settings of config.json; if `bits` is None, each module may have its own bit width."""

    bits: int | None
    group_size: int
    zero_offset: int
    rounds_inputs: bool = False
    rounded_inputs: torch.dtype | None = None
    has_static_inputs: bool = False
    adds_biases: bool = False
    companions: frozenset[str] = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    dropped: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Return the method and its bit width."""
        return f"GPTQ {self.bits or 'mixed'}-bit"

    def tensors(self, stored: Weights) -> Iterator[tuple[str, QuantisedTensor]]:
        """Yield the weight of each module that has a qweight."""
        names = frozenset(stored.names)
        for name in stored.names:
            if name.endswith(_MARK):
                module = name.removesuffix(_MARK)
                ordered = f"{module}.g_idx" in names
                yield f"{module}.weight", Matrix(self._module(stored, module, ordered=ordered))

    def _module(self, stored: Weights, module: str, *, ordered: bool) -> "GptqModule":
        shapes = packed_shapes(stored, module)
        (num_words, outputs), (num_groups, zero_words) = shapes["qweight"], shapes["qzeros"]
        bits = zero_words * WORD_BITS // outputs
        inputs = num_words * WORD_BITS // bits if bits else 0
        size = inputs if self.group_size < 1 else self.group_size
        expected = {
            "qweight": (inputs * bits // WORD_BITS, outputs),
            "qzeros": (-(-inputs // max(size, 1)), outputs * bits // WORD_BITS),
            "scales": (num_groups, outputs),
        }
        whole = bits in SUPPORTED_BITS and not (inputs % fields_per_period(bits) or outputs % fields_per_period(bits))
        if not whole or shapes != expected or self.bits not in (None, bits):
            raise ConfigError(
                f"{module}: qweight {shapes['qweight']}, qzeros {shapes['qzeros']} and scales {shapes['scales']} "
                f"do not fit GPTQ with {self.bits or '2, 3, 4 or 8'} bits and group size {self.group_size}"
            )
        if ordered and part_shape(stored, f"{module}.g_idx") != (inputs,):
            raise ConfigError(f"{module}.g_idx has shape {stored.shape(f'{module}.g_idx')} for {inputs} inputs")
        return GptqModule(stored, module, (outputs, inputs), bits, size, self.zero_offset, ordered)


@dataclass(frozen=True, slots=True)
class GptqModule:
    """One GPTQ layer; `ordered` where it has a g_idx."""

    stored: Weights
    name: str
    shape: tuple[int, int]
    bits: int
    group_size: int
    zero_offset: int
    ordered: bool

    def read(self, rows: range, columns: range) -> Grouped:
        """Read the codes of outputs `rows` and inputs `columns`, and the scales and zeros of their groups."""
        words, inside = covering(columns, self.bits)
        packed = read_region(self.stored, f"{self.name}.qweight", words, rows).t().contiguous()
        codes = unpack(packed, self.bits)[:, inside.start : inside.stop]
        groups, span = self._groups(columns)
        scales = read_region(self.stored, f"{self.name}.scales", span, rows).t()
        return Grouped(codes, scales, self._zeros(rows, span), groups)

    def _groups(self, columns: range) -> tuple[EvenGroups | torch.Tensor, range]:
        """Return each column's group, relative to the first group touched, and the range of groups touched."""
        even = EvenGroups(self.group_size, columns.start % self.group_size)
        plain = torch.arange(columns.start, columns.stop) // self.group_size
        groups = plain
        if self.ordered:
            num_groups = -(-self.shape[1] // self.group_size)
            groups = read_groups(self.stored, f"{self.name}.g_idx", columns, num_groups)
        span = range(int(groups.min()), int(groups.max()) + 1)
        return even if torch.equal(groups, plain) else groups - span.start, span

    def _zeros(self, rows: range, groups: range) -> torch.Tensor:
        words, inside = covering(rows, self.bits)
        packed = read_region(self.stored, f"{self.name}.qzeros", groups, words)
        zeros = unpack(packed, self.bits)[:, inside.start : inside.stop].t()
        return (zeros + self.zero_offset) & ((1 << self.bits) - 1)
