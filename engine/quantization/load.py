"""The weights that a loader reads: those stored, or dequantised ones with a note on the memory cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.checkpoints.weights import Weights
from engine.quantization.interface import Layout
from engine.quantization.kept_load import Keeper
from engine.quantization.kept_static import StaticFormat
from engine.quantization.kept_table import experts_named, formats_named
from engine.quantization.modelslim import ModelSlimLayout
from engine.quantization.weights import DequantisingWeights

_GIB = 1 << 30
_MIB = 1 << 20
_NO_KERNEL = "there is no kernel for them on this device"


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """Weights without quantisation; `note` warns of the memory cost, None where they were stored plain."""

    weights: Weights
    note: str | None = None


def plain_weights(stored: Weights, layout: Layout | None, dtype: str, formats: Sequence[str] = ()) -> PlainWeights:
    """Return `stored`, dequantised to `dtype` if it has a `layout`. Raises ConfigError for tensors that do not fit it.

    `formats` are the device's `kept_linears`. If none of them is for static inputs, layers made for such inputs are
    dequantised too, and a bias that is stored only as part of their integer sums becomes a plain one.
    """
    if layout is None:
        return PlainWeights(stored)
    if isinstance(layout, ModelSlimLayout) and not any(isinstance(one, StaticFormat) for one in formats_named(formats)):
        layout = replace(layout, derives_biases=True)
    weights = DequantisingWeights(stored, layout, getattr(torch, dtype))
    return PlainWeights(weights, _warning(layout, weights, dtype, _NO_KERNEL))


def make_keeper(plain: PlainWeights, layout: Layout | None, formats: Sequence[str], prefix: str = "") -> Keeper | None:
    """Return the Keeper for `formats` (a device's `kept_linears`), None where there is nothing to keep.

    `prefix`: see Keeper.
    """
    if layout is None or not isinstance(plain.weights, DequantisingWeights):
        return None
    linears = [
        one for one in formats_named(formats) if layout.has_static_inputs or not isinstance(one, StaticFormat)
    ]  # fmt: skip
    experts = experts_named(formats)
    if not linears and not experts:
        return None
    return Keeper(plain.weights, linears, experts, rounded_inputs=layout.rounded_inputs, prefix=prefix)


def kept_note(plain: PlainWeights, layout: Layout | None, dtype: str, keeper: Keeper | None) -> str | None:
    """Return a note on which quantised layers were kept and their memory; None where none is quantised."""
    if keeper is None or layout is None or not isinstance(plain.weights, DequantisingWeights):
        return plain.note
    weights = plain.weights
    if not keeper.was_requested:
        return _warning(layout, weights, dtype, "transformers loads them")
    if not keeper.kept:
        return _warning(layout, weights, dtype, next((why for why, _ in _dequantised(weights, keeper)), _NO_KERNEL))
    held = keeper.network_bytes
    kept = held - keeper.float_bytes + keeper.kept_bytes
    whose = "this rank's weights" if keeper.is_cut else "weights"
    return (
        f"{layout.name}, {_count(weights, keeper)}; {whose} take {_size(kept)} of memory, or {_size(held)} "
        f"if dequantised to {dtype}{_others(weights, keeper, dtype)}{_rounding(layout, keeper)}"
    )


def _rounding(layout: Layout, keeper: Keeper) -> str:
    """Return how many of the kept layers round their inputs, and how."""
    by_token = keeper.num_rounded - keeper.num_static
    rounded = str(layout.rounded_inputs).removeprefix("torch.").removesuffix("_e4m3fn")
    ways = {f"{rounded}, token by token": by_token, "int8 by a stored step": keeper.num_static}
    used = [f"rounded to {way}" for way, count in ways.items() if count]
    if not used:
        return ""
    if len(used) == 1 and keeper.num_rounded == keeper.kept:
        return f"; inputs are {used[0]}"
    counts = [count for count in ways.values() if count]
    numbered = (f"{count} layer{'s' * (count != 1)}" for count in counts)
    return "; " + ", ".join(f"inputs of {layers} are {way}" for layers, way in zip(numbered, used, strict=True))


def kept_count(plain: PlainWeights, dtype: str, keeper: Keeper | None) -> str:
    """Return how many layers were kept, and why others were not; "" where there is nothing to keep."""
    if keeper is None or not keeper.was_requested or not isinstance(plain.weights, DequantisingWeights):
        return ""
    return _count(plain.weights, keeper) + _others(plain.weights, keeper, dtype)


def _count(weights: DequantisingWeights, keeper: Keeper) -> str:
    return f"kept: {keeper.kept} of {weights.num_quantised} quantised layers"


def _others(weights: DequantisingWeights, keeper: Keeper, dtype: str) -> str:
    return "".join(f"; {count} dequantised to {dtype}: {why}" for why, count in _dequantised(weights, keeper))


def _dequantised(weights: DequantisingWeights, keeper: Keeper) -> list[tuple[str, int]]:
    """Return each reason why tensors were dequantised, with their number; the most frequent reason first."""
    reasons = keeper.reasons.copy()
    reasons["they are not linear layers of the network"] = weights.num_quantised - keeper.kept - reasons.total()
    return [(why, count) for why, count in reasons.most_common() if count]


def _warning(layout: Layout, weights: DequantisingWeights, dtype: str, why: str) -> str:
    inputs = "; inputs are not quantised" if layout.rounds_inputs else ""
    return (
        f"warning: {layout.name} weights are dequantised to {dtype} at load, as {why}: "
        f"{_size(weights.stored_bytes)} stored take {_size(weights.held_bytes)} of memory{inputs}"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"
