"""The attention backends by name: each device kind's own (Traits.attention of devices/), and the reference."""

from collections.abc import Callable

from devices.interface import Device
from devices.table import AUTO
from engine.attention.cpu import CpuAttention
from engine.attention.cuda import make_cuda_attention
from engine.attention.interface import AttentionBackend
from engine.attention.npu import NpuAttention
from engine.attention.reference import ReferenceAttention
from native.engine_library import Threads
from wire.errors import ConfigError

Maker = Callable[[Device, Threads | None], AttentionBackend]
"""Makes a backend for a device; `threads` run the CPU's kernels (None: there are no threads for them)."""

REFERENCE = "reference"


def _reference(device: Device, threads: Threads | None) -> AttentionBackend:
    return ReferenceAttention()


def _cpu(device: Device, threads: Threads | None) -> AttentionBackend:
    return CpuAttention(threads)


def _cuda(device: Device, threads: Threads | None) -> AttentionBackend:
    return make_cuda_attention(device)


def _npu(device: Device, threads: Threads | None) -> AttentionBackend:
    return NpuAttention()


MAKERS: dict[str, Maker] = {REFERENCE: _reference, "cpu": _cpu, "cuda": _cuda, "npu": _npu}


def make_backend(name: str, device: Device, threads: Threads | None = None) -> AttentionBackend:
    """Return the backend called `name`; `auto` is the device's own. Raises ConfigError if it cannot run here."""
    own = device.traits.attention
    name = own if name == AUTO else name
    if name not in (own, REFERENCE):
        raise ConfigError(f"attention backend {name!r} is not one of {AUTO}, {own}, {REFERENCE} on {device.name}")
    return MAKERS.get(name, _reference)(device, threads)
