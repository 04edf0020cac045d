"""The quantization_config of compressed-tensors: supported schemes become a layout; others are refused by name."""

from typing import Any

import torch

from engine.quantization.compressed import PACKED_BITS, CompressedLayout
from engine.quantization.config import QuantizationConfig, compressed_groups, read_block
from wire.errors import ConfigError

_UNPACKED = {"int-quantized": "int", "float-quantized": "float", "naive-quantized": None}
_PACKED = "pack-quantized"
_MIXED = "mixed-precision"  # each group has its own format
_ROUNDED = {"int": torch.int8, "float": torch.float8_e4m3fn}
_STATUSES = ("compressed", None)


def read_compressed(config: QuantizationConfig) -> CompressedLayout:
    """Return the layout. Raises ConfigError naming the format, width or transform that is not supported."""
    values = config.values
    if values.get("quantization_status") not in _STATUSES:
        raise ConfigError(f"{config.source}: its weights are {values['quantization_status']}, not compressed")
    sparsity = _section(values, "sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise ConfigError(f"{config.source}: sparse weights ({sparsity}) are not supported")
    if _section(values, "transform_config").get("config_groups"):
        raise ConfigError(f"{config.source}: transforms of weights and activations are not supported")
    groups = compressed_groups(config)
    if not groups:
        raise ConfigError(f"{config.source}: config_groups of compressed-tensors are missing")
    names = sorted({_check_group(config, group) for group in groups})
    inputs = any(group.get("input_activations") for group in groups)
    name = f"compressed-tensors {' and '.join(names)}"
    rounded = {_rounded_type(group.get("input_activations")) for group in groups}
    rounded_inputs = rounded.pop() if len(rounded) == 1 else None
    return CompressedLayout(name, inputs, _block(config, groups), _group_sizes(config, groups), rounded_inputs)


def _rounded_type(inputs: Any) -> torch.dtype | None:
    """Return the type of symmetric 8-bit inputs with dynamic scales, which are then rounded with one scale per token.

    That is at least as fine as required: returns None for inputs with several scales per token, and for any others.
    """
    if not isinstance(inputs, dict) or inputs.get("dynamic") is not True or inputs.get("strategy") == "group":
        return None
    if (inputs.get("num_bits", 8), inputs.get("symmetric", True)) != (8, True):
        return None
    return _ROUNDED.get(inputs.get("type", "int"))


def _section(values: dict[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _check_group(config: QuantizationConfig, group: dict[str, Any]) -> str:
    """Check a config group and return the type of its weights, such as `int8`."""
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise ConfigError(f"{config.source}: a config group without quantised weights is not supported")
    found = config.values.get("format")
    if found in (_MIXED, None):
        found = group.get("format")
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if found == _PACKED:
        if kind != "int" or bits not in PACKED_BITS:
            allowed = " or ".join(map(str, PACKED_BITS))
            raise ConfigError(
                f"{config.source}: {found} with {bits}-bit {kind} is not supported: only int with {allowed} bits"
            )
    elif found not in _UNPACKED:
        known = ", ".join((*_UNPACKED, _PACKED))
        raise ConfigError(f"{config.source}: compressed-tensors format {found} is not supported: only {known}")
    elif bits != 8 or _UNPACKED[found] not in (kind, None):
        raise ConfigError(f"{config.source}: {found} with {bits}-bit {kind} is not supported: only 8-bit")
    return f"{kind}{bits}"


def _group_sizes(config: QuantizationConfig, groups: list[dict[str, Any]]) -> frozenset[int]:
    """Return the inputs per scale of each config group with several scales per row."""
    sizes = [group["weights"].get("group_size") for group in groups if group["weights"].get("strategy") == "group"]
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{config.source}: group_size {size!r} of weights must be a whole number above 0")
    return frozenset(sizes)


def _block(config: QuantizationConfig, groups: list[dict[str, Any]]) -> tuple[int, int] | None:
    """Return the rectangle of one scale where weights are quantised by blocks."""
    blocks = [
        group["weights"].get("block_structure") for group in groups if group["weights"].get("strategy") == "block"
    ]
    if not blocks:
        return None
    first = blocks[0]
    if len(blocks) < len(groups) or any(block != first for block in blocks):
        raise ConfigError(f"{config.source}: blocks {blocks} together with other strategies are not supported")
    return read_block(config, first)
