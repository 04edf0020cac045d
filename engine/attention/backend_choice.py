"""Choose the attention backend at load: the device's own where it passes a check, else the reference.

A backend may have `alternatives`: backends to try, in their order, before the reference. For some devices the check
runs in a child process (engine/kernel_check.py).

On the CPU nothing is checked at start: its kernels pass the contract tests on machines like the user's.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from devices.interface import Device
from engine.attention.interface import AttentionBackend, AttentionOptions
from engine.attention.probe import LayerKind, differs, usual_parts, with_short_window
from engine.attention.reference import ReferenceAttention
from engine.kernel_check import kernel_check
from telemetry.logs import EventLogger

_log = EventLogger("engine")


def trusted(
    backend: AttentionBackend, network: Any, device: Device, *, block_size: int, dtype: torch.dtype
) -> tuple[AttentionBackend, str | None]:
    """Return `backend` and None, or the next backend that computes correctly here and a note with the reason.

    The reason is also logged.

    Runs one token of `network` on `device` and replaces the network's attention handler.
    """
    if device.traits.pools_on_host or isinstance(backend, ReferenceAttention):
        return backend, None
    kinds, check = layer_kinds(network), kernel_check(device)
    params = {
        "kinds": [asdict(kind) for kind in kinds], "block_size": block_size, "dtype": str(dtype).rpartition(".")[2],
    }  # fmt: skip
    note: str | None = None
    for place, (candidate, following) in enumerate(pairwise((*with_alternatives(backend), ReferenceAttention()))):
        here = partial(why_not, candidate, kinds, device, block_size, dtype)
        why = check("attention", params | {"place": place}, here)
        if why is None:
            return candidate, note
        note = _warn(candidate, following, device, why)
    return following, note


def with_alternatives(backend: AttentionBackend) -> tuple[AttentionBackend, ...]:
    """Return the backend and those to try after it."""
    return (backend, *getattr(backend, "alternatives", ()))


def why_not(
    backend: AttentionBackend, kinds: Sequence[LayerKind], device: Device, block_size: int, dtype: torch.dtype
) -> str | None:
    """Return how `backend` fails or differs from the reference on these kinds of layer, None if it does not."""
    for kind in map(with_short_window, kinds):
        try:
            why = differs(
                backend, kind, usual_parts(block_size), block_size=block_size, dtype=dtype, device=device.torch_device
            )
        except Exception as error:  # noqa: BLE001 - a driver's library may raise anything; the next backend is tried
            why = f"{kind}: {type(error).__name__}: {' '.join(str(error).split())}"
        if why is not None:
            return why
    return None


def layer_kinds(network: Any) -> tuple[LayerKind, ...]:
    """Return the attention parameters of a loaded network's layers, each kind once, in layer order."""
    from engine.attention.registered import attach  # transformers, which a check's child process does without

    seen = _Seen()
    attach(network, seen)
    with torch.inference_mode():
        zero = torch.zeros(1, 1, dtype=torch.int64, device=next(iter(network.parameters())).device)
        network(input_ids=zero, position_ids=zero, use_cache=False)
    return tuple(seen.kinds)


class _Seen:
    """Implements LayerHandler: records each kind; one token attends only to itself, so its value is the output."""

    def __init__(self) -> None:
        self.kinds: dict[LayerKind, None] = {}

    def run_layer(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See LayerHandler."""
        kind = LayerKind(
            query.shape[0], key.shape[0], key.shape[2], value.shape[2], options.scaling, options.sliding_window,
            options.softcap, options.sinks is not None,
        )  # fmt: skip
        self.kinds[kind] = None
        return value.repeat_interleave(query.shape[0] // value.shape[0], dim=0).transpose(0, 1)


def _warn(backend: AttentionBackend, following: AttentionBackend, device: Device, why: str) -> str:
    name = device.traits.attention
    failed, used = type(backend).__name__, type(following).__name__
    _log.warning("attention_fallback", failed=failed, used=used, device=device.name, error=why)
    taken = getattr(following, "note", "attention by the reference")
    return f"{taken}, because {name!r} fails its check on {device.name}: {why}"
