"""The devices that the tests of this folder run on, by name; one that this machine lacks is skipped by name.

cpu   what the product opens on every machine
fake  a device in one file (fake_device.py): CPU tensors, pools like a card's
card  a device whose tensors are not the CPU's (card.py): code that treats them as host tensors fails
cuda  a GPU, where torch sees one
npu   the NPU's own ops by their schemas, computed on the CPU (tests/npu)

card-cuda and card-npu are the card with the attention of GPUs and NPUs.
"""

from collections.abc import Callable

import pytest
import torch

from devices.cpu import CpuDevice
from devices.cuda import CudaKind
from devices.interface import Device
from engine.attention.backends import make_backend
from engine.attention.interface import AttentionBackend, AttentionOptions, StepAttention
from engine.step import StepBatch
from engine.step_metadata import StepMetadata, build
from tests.devices.card_device import CardDevice
from tests.devices.fake_device import FakeDevice
from tests.npu.npu_on_cpu import NpuOnCpu
from tests.npu.ops import require_npu_ops

_LACKING = CudaKind().lacking()


def _cuda() -> Device:
    if _LACKING is not None:
        pytest.skip(f"cuda: {_LACKING}")
    return CudaKind().open()


def _npu() -> Device:
    require_npu_ops()
    return NpuOnCpu()


def _npu_card() -> Device:
    require_npu_ops()
    return CardDevice(attention="npu", block_size=128)


DEVICES: dict[str, Callable[[], Device]] = {
    "cpu": CpuDevice,
    "fake": FakeDevice,
    "card": CardDevice,
    "card-cuda": lambda: CardDevice(attention="cuda"),
    "card-npu": _npu_card,
    "cuda": _cuda,
    "npu": _npu,
}
_MARKS = {
    "card-cuda": [pytest.mark.long],
    "card-npu": [pytest.mark.long],
    "cuda": [pytest.mark.skipif(_LACKING is not None, reason=f"cuda: {_LACKING}")],
}
EVERY = [pytest.param(name, marks=_MARKS.get(name, [])) for name in DEVICES]
ACCELERATORS = EVERY[1:]


def open_device(name: str) -> Device:
    """Return the device, or skip the test with the reason."""
    return DEVICES[name]()


def attention_of(name: str) -> AttentionBackend:
    """Return the device's own attention, which takes and returns CPU tensors."""
    device = open_device(name)
    return OnDevice(make_backend("auto", device), device.torch_device)


class OnDevice:
    """Implements AttentionBackend: a step's tensors are copied to the device, and its results back."""

    def __init__(self, backend: AttentionBackend, device: torch.device) -> None:
        self._backend, self._device = backend, device

    def plan(self, metadata: StepMetadata) -> "StepOnDevice":
        """Plan the same step there."""
        batch = StepBatch(tuple(metadata.packed.token_ids), tuple(metadata.sequences), ())
        there = build(batch, block_size=metadata.block_size, device=self._device)
        return StepOnDevice(self._backend.plan(there), self._device)


class StepOnDevice:
    """Implements StepAttention; whole pools are copied to the device, and back once they are written."""

    def __init__(self, step: StepAttention, device: torch.device) -> None:
        self._step, self._device = step, device

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        """See StepAttention.write."""
        there = keys.to(self._device), values.to(self._device)
        self._step.write(*there, new_keys.to(self._device), new_values.to(self._device))
        keys.copy_(there[0])
        values.copy_(there[1])

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See StepAttention.attend."""
        sinks = None if options.sinks is None else options.sinks.to(self._device)
        there = AttentionOptions(options.scaling, options.sliding_window, options.softcap, sinks)
        query, keys, values = (tensor.to(self._device) for tensor in (query, keys, values))
        return self._step.attend(query, keys, values, there).cpu()
