"""Detect a checkpoint's quantisation and check it against --quantization, before any weights are loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.quantization.awq import BITS as AWQ_BITS
from engine.quantization.awq import AwqLayout
from engine.quantization.compressed_config import read_compressed
from engine.quantization.config import QuantizationConfig, read_block, read_quantization_config
from engine.quantization.fp8 import Fp8Layout
from engine.quantization.gptq import SUPPORTED_BITS as GPTQ_BITS
from engine.quantization.gptq import GptqLayout
from engine.quantization.interface import Layout
from engine.quantization.modelslim import read_modelslim
from engine.quantization.mxfp4 import Mxfp4Layout
from engine.quantization.requested import check_requested
from wire.errors import ConfigError

_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # added to a stored zero, by GPTQ format


def find_quantization(path: Path, requested: str | None) -> Layout | None:
    """Return the quantised layout of the checkpoint in folder `path`, None where its weights are plain.

    `requested` is --quantization. Raises ConfigError, with both values, if flag and checkpoint differ, and for
    unsupported layouts.
    """
    config = read_quantization_config(path)
    if requested is not None:
        check_requested(path, requested, config)
    if config is None:
        return None
    read = _READERS.get(config.method)
    if read is None:
        raise ConfigError(
            f"{config.source}: quantised by {config.method}, which is not supported; supported: {', '.join(_READERS)}"
        )
    return read(config)


def _read_awq(config: QuantizationConfig) -> Layout:
    version = str(config.values.get("version", config.values.get("format", "gemm"))).lower()
    backend = str(config.values.get("backend", "autoawq")).lower()
    if version != "gemm" or backend == "llm-awq":
        raise ConfigError(f"{config.source}: AWQ's {version} layout of {backend} is not supported: only autoawq's gemm")
    bits = _integer(config, ("bits", "w_bit"), AWQ_BITS)
    if bits != AWQ_BITS:
        raise ConfigError(f"{config.source}: AWQ with {bits} bits is not supported: only {AWQ_BITS}")
    if not config.values.get("zero_point", True):
        raise ConfigError(f"{config.source}: AWQ without zero points is not supported")
    return AwqLayout(_group_size(config, ("group_size", "q_group_size")))


def _read_gptq(config: QuantizationConfig) -> Layout:
    values = config.values
    if values.get("is_marlin_format"):
        raise ConfigError(f"{config.source}: GPTQ's marlin format is not supported: only {', '.join(_ZERO_OFFSETS)}")
    name = str(values.get("checkpoint_format") or values.get("format") or "gptq").lower()
    if name not in _ZERO_OFFSETS:
        raise ConfigError(f"{config.source}: GPTQ's {name} format is not supported: only {', '.join(_ZERO_OFFSETS)}")
    if values.get("pack_dtype", "int32") != "int32":
        raise ConfigError(f"{config.source}: GPTQ packed in {values['pack_dtype']} is not supported: only int32")
    bits = _integer(config, ("bits",), 4)
    if bits not in GPTQ_BITS:
        known = ", ".join(map(str, GPTQ_BITS))
        raise ConfigError(f"{config.source}: GPTQ with {bits} bits is not supported: only {known}")
    if _changes_groups(values.get("dynamic")):
        raise ConfigError(f"{config.source}: GPTQ with other group sizes for some modules (`dynamic`) is not supported")
    return GptqLayout(
        None if values.get("dynamic") else bits, _group_size(config, ("group_size",)), _ZERO_OFFSETS[name]
    )


def _changes_groups(dynamic: Any) -> bool:
    """Return whether GPTQ's per-module rules change the group size; bit widths are read from the tensors instead."""
    rules = dynamic.values() if isinstance(dynamic, dict) else ()
    return any(isinstance(rule, dict) and "group_size" in rule for rule in rules)


def _group_size(config: QuantizationConfig, keys: tuple[str, ...]) -> int:
    size = _integer(config, keys, 128)
    if size < 1 and size != -1:
        raise ConfigError(f"{config.source}: group size {size} must be positive, or -1 for one group")
    return size


def _integer(config: QuantizationConfig, keys: tuple[str, ...], default: int) -> int:
    value = next((config.values[key] for key in keys if config.values.get(key) is not None), default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{config.source}: {keys[0]} is {value!r}, not a whole number")
    return value


def _read_fp8(config: QuantizationConfig) -> Layout:
    values = config.values
    if str(values.get("fmt", "e4m3")).lower() not in ("e4m3", "float8_e4m3fn"):
        raise ConfigError(f"{config.source}: fp8 of format {values['fmt']} is not supported: only e4m3")
    is_dynamic = values.get("activation_scheme", "dynamic") == "dynamic"
    block = read_block(config, values.get("weight_block_size"))
    return Fp8Layout(block, rounded_inputs=torch.float8_e4m3fn if is_dynamic else None)


_READERS: dict[str, Callable[[QuantizationConfig], Layout]] = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": read_compressed,
    "fp8": _read_fp8,
    "mxfp4": lambda config: Mxfp4Layout(),
    "modelslim": read_modelslim,
}
