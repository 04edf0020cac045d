"""The dtype of weights and KV: the requested one, or the one that this machine computes fastest."""

import platform
from dataclasses import dataclass
from pathlib import Path

from wire.errors import ConfigError
from wire.kv_layout import ITEM_BYTES

_FAST_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """A dtype and the reason for it, as shown to the user."""

    name: str
    reason: str


def choose_dtype(
    requested: str, checkpoint: str, *, cpu_flags: frozenset[str] | None, is_native: bool = False
) -> DtypeChoice:  # fmt: skip
    """Return `requested`, or for `auto` the checkpoint's dtype where the CPU computes it fast, else float32.

    `cpu_flags` is None where the model runs on a device that is fast with every dtype. `is_native`: our own kernels
    run the whole model, or will at the next start; they are fast with bfloat16 on every CPU that supports them.
    """
    if requested != "auto":
        if requested not in ITEM_BYTES:
            raise ConfigError(f"dtype {requested!r} is not one of auto, {', '.join(ITEM_BYTES)}")
        return DtypeChoice(requested, f"dtype {requested}, as requested")
    if cpu_flags is None:
        return DtypeChoice(checkpoint, f"dtype {checkpoint}, the checkpoint's")
    fast = [flag for flag in _FAST_BF16_FLAGS if flag in cpu_flags]
    if checkpoint == "bfloat16" and fast:
        return DtypeChoice("bfloat16", f"dtype bfloat16, the checkpoint's: the CPU has {fast[0]}")
    if checkpoint == "bfloat16" and is_native:
        return DtypeChoice("bfloat16", "dtype bfloat16, the checkpoint's, which native kernels compute fast")
    if checkpoint == "float32":
        return DtypeChoice("float32", "dtype float32, the checkpoint's")
    return DtypeChoice("float32", f"dtype float32: the checkpoint is {checkpoint}, which this CPU computes slowly")


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the CPU's feature names; none where the system does not provide them."""
    label = "Features" if platform.machine() == "aarch64" else "flags"
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(label)), "")
    return frozenset(found.partition(":")[2].split())
