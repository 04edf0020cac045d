"""Compare the device's attention backend with the reference, for each kind of step and layer.

Each check covers every dtype of served models, the device's block size and the largest block size of any peer.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from devices.interface import Device
from engine.attention.interface import AttentionBackend
from engine.attention.probe import LayerKind, Part, differs, usual_parts
from pdserve.selftest.check import SelftestCheck, Wrong

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LARGE_BLOCK = 128
_GROUPED = LayerKind(8, 2, 64, 64, 0.125)
_STEPS: dict[str, Sequence[Part]] = {
    "a whole prompt": [(0, 37)],
    "a chunk of a prompt": [(150, 21)],
    "decode": [(40, 1), (130, 1), (0, 1), (128, 1)],
}
_LAYERS = {
    "prompts, chunks and decodes in one step": _GROUPED,
    "one KV head": LayerKind(4, 1, 64, 64, 0.125),
    "a KV head each": LayerKind(4, 4, 128, 128, 0.088),
    "9 heads over 3": LayerKind(9, 3, 64, 64, 0.125),
    "head dim 96": LayerKind(8, 2, 96, 96, 0.102),
    "window": LayerKind(8, 2, 64, 64, 0.125, sliding_window=20),
    "softcap": LayerKind(8, 2, 64, 64, 0.125, softcap=30.0),
    "sinks": LayerKind(8, 2, 64, 64, 0.125, has_sinks=True),
}


def attention_checks(device: Device, make: Callable[[], AttentionBackend]) -> Iterator[SelftestCheck]:
    """Yield the checks; the first one creates the backend, so that a failure to create it is a row too."""
    backend = functools.cache(make)
    for name, parts in _STEPS.items():
        yield SelftestCheck("attention", name, functools.partial(_attend, device, backend, _GROUPED, parts))
    for name, kind in _LAYERS.items():
        yield SelftestCheck("attention", name, functools.partial(_attend, device, backend, kind, None))


def _attend(
    device: Device, backend: Callable[[], AttentionBackend], kind: LayerKind, parts: Sequence[Part] | None
) -> str:
    own = device.traits.block_size
    sizes = sorted({own, _LARGE_BLOCK})
    for dtype, size in [*((dtype, own) for dtype in _DTYPES), (_DTYPES[0], _LARGE_BLOCK)]:
        why = differs(
            backend(), kind, parts or usual_parts(size), block_size=size, dtype=dtype, device=device.torch_device
        )
        if why is not None:
            raise Wrong(f"{str(dtype).removeprefix('torch.')}, blocks of {size}: {why}")
    return f"{type(backend()).__name__}, {len(_DTYPES)} dtypes, blocks of {' and '.join(map(str, sizes))}"
