"""The layout of Ascend's ModelSlim: a description gives the scheme of each stored tensor.

    W8A8, W8A8S           weight int8 [outputs, inputs]; deq_scale [outputs], float32 or its bits as int64;
                          input_scale and input_offset [1]; quant_bias int32 [outputs]. W8A8S: many weights are 0
    W8A8_DYNAMIC, W8A16   weight int8; weight_scale and weight_offset [outputs, 1] or [outputs, groups]
    W8A8_MIX              the tensors of W8A8 and of W8A8_DYNAMIC; only the latter are used here
    W4A8_DYNAMIC          as W8A8_DYNAMIC, but weights int8 [outputs / 2, inputs] (scaled.py), older ones [outputs,
                          inputs]; also scale_bias, which only one kernel needs
    W8A8FP8_DYNAMIC       as W8A8_DYNAMIC, but weights in float8; ModelSlim's name for it is WFP8AFP8_DYNAMIC

W8A8 is made for inputs x_q = round(x / input_scale + input_offset), and outputs (x_q . weight + quant_bias) * deq_scale
with quant_bias = round(bias / deq_scale) - input_offset * (sum of the weight's row). A layer that stays quantised
computes that (kept_static.py). Dequantised, the weight is codes * deq_scale / input_scale, and the bias is the stored
one or, if there is none and `derives_biases` is set, the one contained in quant_bias.

Sources:
    github.com/Ascend/msmodelslim/msmodelslim/core/quant_service/modelslim_v1/save/ascendv1.py
    github.com/Ascend/msmodelslim/msmodelslim/pytorch/llm_ptq/llm_ptq_tools/save/complex_quantifier.py, older versions
    github.com/vllm-project/vllm-ascend/vllm_ascend/quantization/methods/w8a8_static.py, and others beside it
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoints.weights import TensorSlice, Weights
from engine.quantization.arithmetic import Matrix
from engine.quantization.config import QuantizationConfig
from engine.quantization.interface import (
    Grouped,
    QuantisedModule,
    QuantisedTensor,
    StaticInputs,
    read_region,
)
from engine.quantization.parts import FLOATS, matrix_shape, part_shape
from engine.quantization.scaled import ScaleGrid, groups_of, scaled_module
from wire.errors import ConfigError

_FLOAT = "FLOAT"
_STATIC = ("W8A8", "W8A8S")
_HALVES = "W4A8_DYNAMIC"
_BY_TOKEN: Mapping[str, torch.dtype | None] = {
    "W8A8_MIX": torch.int8, "W8A8_DYNAMIC": torch.int8, _HALVES: torch.int8, "W8A16": None,
    "W8A8FP8_DYNAMIC": torch.float8_e4m3fn, "WFP8AFP8_DYNAMIC": torch.float8_e4m3fn,
}  # fmt: skip
"""The other schemes, and the type to which they round inputs."""
_READ = (_FLOAT, *_STATIC, *_BY_TOKEN)
_REASONS = {
    "FLATQUANT": "inputs are transformed at run time",
    "mul_scale": "inputs are smoothed at run time",
    "quarot": "inputs are rotated at run time",
    "weight_scale_second": "it has scales of two levels, which vLLM Ascend does not read either",
    "MXFP": "only Ascend 950 multiplies its blocks",
    "W4A4": "inputs have 4 bits",
    "W4A16": "its packs of 4-bit codes are not read",
    "W8A8SC": "weights are compressed",
    "FAQuant": "attention computes in floats",
    "fa_quant_type": "attention computes in floats",
    "C8": "the KV cache has the dtype of the model",
}
"""Why a scheme is refused, by a part of its name; the first part found counts."""
_REFUSED_KEYS = ("kv_cache_type", "kv_quant_type", "fa_quant_type", "indexer_quant_type", "reduce_quant_type")
_TENSORS_REFUSED = ("mul_scale", "weight_scale_second")
_KV_SCALES = (".kv_cache_scale", ".kv_cache_offset")  # older files give them the scheme of their layer
_SMOOTHED = ".module.weight"  # older files have the smoothed norm twice, also under this name


@dataclass(frozen=True, slots=True)
class ModelSlimLayout:
    """A ModelSlim description: the scheme of each quantised weight, and the inputs per scale, 0 for one scale per row.

    `derives_biases`, for layers that are dequantised: a static layer without a stored bias gets the one contained in
    its quant_bias, and its codes are read to compute it.
    """

    kind: str
    schemes: Mapping[str, str]
    group_size: int
    derives_biases: bool = False
    adds_biases: bool = True
    companions: frozenset[str] = frozenset(
        {"weight_scale", "weight_offset", "deq_scale", "quant_bias", "input_scale", "input_offset", "scale_bias"}
    )
    dropped: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Return the method and the checkpoint's own name of its scheme."""
        return f"ModelSlim {self.kind}"

    @property
    def rounds_inputs(self) -> bool:
        """Whether any layer was made for int8 or float8 inputs."""
        return any(scheme in _STATIC or _BY_TOKEN[scheme] for scheme in self.schemes.values())

    @property
    def rounded_inputs(self) -> torch.dtype | None:
        """The type to which all layers that are not static round their inputs, token by token; None if they differ."""
        types = {_BY_TOKEN[scheme] for scheme in self.schemes.values() if scheme not in _STATIC}
        return types.pop() if len(types) == 1 else None

    @property
    def has_static_inputs(self) -> bool:
        """Whether any layer rounds its inputs by a stored step."""
        return any(scheme in _STATIC for scheme in self.schemes.values())

    def tensors(self, stored: Weights) -> Iterator[tuple[str, QuantisedTensor]]:
        """Yield the weight of each module that the description calls quantised, and biases that are derived."""
        names = frozenset(stored.names)
        for name in stored.names:
            if name.endswith(".weight") and name not in self.schemes and stored.dtype(name) == torch.int8:
                raise ConfigError(f"{name} is int8, but ModelSlim's description does not mark it as quantised")
        for name, scheme in self.schemes.items():
            module = name.removesuffix(".weight")
            if name.endswith(_SMOOTHED):
                _check_norm(stored, module)
            elif scheme in _STATIC:
                has_bias = f"{module}.bias" in names
                static = _static_module(stored, module, has_bias=has_bias or self.derives_biases)
                yield name, _StaticMatrix(static)
                if self.derives_biases and not has_bias:
                    yield f"{module}.bias", DerivedBias(static)
            else:
                yield name, Matrix(self._scaled(stored, module, names, has_halves=scheme == _HALVES))

    def _scaled(self, stored: Weights, module: str, names: frozenset[str], *, has_halves: bool) -> QuantisedModule:
        zero, scale = f"{module}.weight_offset", f"{module}.weight_scale"
        rows = part_shape(stored, scale)[:1]
        if has_halves:
            has_halves = rows != part_shape(stored, f"{module}.weight")[:1]
        sizes = frozenset({self.group_size} if self.group_size > 0 else ())
        return scaled_module(
            stored, module, scale=scale, zero=zero if zero in names else None, block=None, group_sizes=sizes,
            has_halves=has_halves,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StaticModule:
    """One layer of scheme W8A8; its scale is deq_scale / input_scale. `has_bias`: it has a bias besides quant_bias."""

    stored: Weights
    name: str
    shape: tuple[int, int]
    input_scale: float
    input_offset: int
    has_bias: bool

    def read(self, rows: range, columns: range) -> Grouped:
        """Read the codes of this range, and the scales and biases of its rows."""
        scales = self._scales(rows)
        bias = self._of_rows("quant_bias", rows) if columns.start == 0 else None
        return Grouped(
            self._codes(rows, columns), scales[:, None] / self.input_scale, None,
            groups_of(ScaleGrid(1, self.shape[1]), columns),
            StaticInputs(self.input_scale, self.input_offset, scales, bias),
        )  # fmt: skip

    def bias(self, rows: range) -> torch.Tensor:
        """Return the bias contained in quant_bias, float32 [num_rows]: quant_bias without the share of the offset.

        If no row's quant_bias differs from that share by more than float32 rounding, in which the share was computed,
        there is no bias: all values are 0.
        """
        share = self._codes(rows, range(self.shape[1])).sum(1).double() * self.input_offset
        rest = self._of_rows("quant_bias", rows).double() + share
        if not bool((rest.abs() > 1 + share.abs() * 4 * torch.finfo(torch.float32).eps).any()):
            return torch.zeros(len(rows))
        return (rest * self._scales(rows)).float()

    def _scales(self, rows: range) -> torch.Tensor:
        scales = self._of_rows("deq_scale", rows)
        return (scales.to(torch.int32).view(torch.float32) if scales.dtype == torch.int64 else scales).float()

    def _codes(self, rows: range, columns: range) -> torch.Tensor:
        return read_region(self.stored, f"{self.name}.weight", rows, columns)

    def _of_rows(self, part: str, rows: range) -> torch.Tensor:
        return self.stored.read(f"{self.name}.{part}", TensorSlice(0, rows.start, rows.stop)).flatten()


@dataclass(frozen=True, slots=True)
class _StaticMatrix(Matrix):
    """The plain weight of a layer of scheme W8A8."""

    module: StaticModule

    def dequantise(self, part: TensorSlice | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, or a range of its rows or columns. Raises ConfigError for a bias that is not stored."""
        if not self.module.has_bias:
            rows = range(self.module.shape[0])
            if part is not None and part.dim == 0:
                rows = range(part.start, part.end)
            if bool(self.module.bias(rows).any()):
                name = self.module.name
                raise ConfigError(f"{name} has a bias in its quant_bias, but {name}.bias is missing")
        return Matrix.dequantise(self, part, dtype)


@dataclass(frozen=True, slots=True)
class DerivedBias:
    """The bias of a layer of scheme W8A8 that is contained only in its quant_bias; zeros where there is none."""

    module: StaticModule

    @property
    def shape(self) -> tuple[int, ...]:
        """(outputs,)."""
        return self.module.shape[:1]

    def dequantise(self, part: TensorSlice | None, dtype: torch.dtype) -> torch.Tensor:
        """See QuantisedTensor."""
        rows = range(self.module.shape[0]) if part is None else range(part.start, part.end)
        return self.module.bias(rows).to(dtype)


def read_modelslim(config: QuantizationConfig) -> ModelSlimLayout:
    """Return the layout. Raises ConfigError naming the layer and the scheme that is not supported."""
    values, schemes = config.values, {}
    for name, value in values.items():
        if "." not in name:
            continue  # it describes the whole checkpoint
        layer, _, tensor = name.rpartition(".")
        scheme = "C8" if name.endswith(_KV_SCALES) else value
        if tensor in _TENSORS_REFUSED:
            scheme = f"{value} with {tensor}"
        if scheme not in _READ:
            raise _unsupported(config, f"{layer} is {scheme}")
        if scheme != _FLOAT and tensor == "weight":
            schemes[name] = value
    for key in _REFUSED_KEYS:
        if values.get(key):
            raise _unsupported(config, f"{key} is {values[key]}")
    metadata = values.get("metadata")
    if isinstance(metadata, dict) and metadata.get("quarot"):
        raise _unsupported(config, "metadata.quarot is set")
    return ModelSlimLayout(str(values.get("model_quant_type", "")), schemes, _group_size(config))


def _unsupported(config: QuantizationConfig, what: str) -> ConfigError:
    reason = next((f" ({why})" for part, why in _REASONS.items() if part in what), "")
    return ConfigError(
        f"{config.source}: {what}, which is not supported{reason}; supported ModelSlim schemes: {', '.join(_READ)}"
    )


def _group_size(config: QuantizationConfig) -> int:
    size: Any = config.values.get("group_size", 0)
    if not isinstance(size, int) or isinstance(size, bool):
        raise ConfigError(f"{config.source}: group_size is {size!r}, not a whole number")
    return size


def _static_module(stored: Weights, module: str, *, has_bias: bool) -> StaticModule:
    shape = matrix_shape(stored, f"{module}.weight", (torch.int8,))
    for part, dtypes in (("deq_scale", (torch.int64, *FLOATS)), ("quant_bias", (torch.int32,))):
        found, dtype = part_shape(stored, f"{module}.{part}"), stored.dtype(f"{module}.{part}")
        if found not in ((shape[0],), (shape[0], 1)) or dtype not in dtypes:
            raise ConfigError(f"{module}.{part} is {dtype} {found}, not one number for each row of a weight {shape}")
    scale, offset = (_number(stored, f"{module}.{part}") for part in ("input_scale", "input_offset"))
    if not 0 < scale < float("inf"):
        raise ConfigError(f"{module}.input_scale is {scale}; it must be a finite number above 0")
    if not offset.is_integer() or not -128 <= offset <= 127:
        raise ConfigError(f"{module}.input_offset is {offset}; it must be a whole number from -128 to 127")
    return StaticModule(stored, module, shape, scale, int(offset), has_bias)


def _number(stored: Weights, name: str) -> float:
    shape = part_shape(stored, name)
    if torch.Size(shape).numel() != 1:
        raise ConfigError(f"{name} has shape {shape}, not one number")
    return float(stored.read(name))


def _check_norm(stored: Weights, module: str) -> None:
    """Raise ConfigError unless a norm's smoothed copy equals the norm, whose name the network has."""
    norm, names = module.removesuffix(".module"), frozenset(stored.names)
    for part in ("weight", "bias"):
        copy, own = (stored.read(name) if name in names else None for name in (f"{module}.{part}", f"{norm}.{part}"))
        if copy is not None and copy.any() and (own is None or not torch.equal(copy, own)):
            raise ConfigError(
                f"{module}.{part} differs from {norm}.{part}: export the checkpoint again with a newer ModelSlim"
            )
