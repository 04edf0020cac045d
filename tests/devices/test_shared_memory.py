"""Memory that a child process maps: what a kind shares and maps is one memory, and torch_npu's calls are made right."""

import os
from typing import Any

import pytest
import torch

from devices.cpu import CpuDevice
from devices.npu_memory import map_npu_memory, share_npu_memory
from devices.torch_device import TorchDevice


def test_shared_host_memory_is_one_memory() -> None:
    shared = CpuDevice().share_memory(10_000)
    mapped = CpuDevice().map_shared(shared.handle, shared.fds, 10_000)

    mapped[9_000:9_004] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)

    assert shared.tensor[9_000:9_004].tolist() == [1, 2, 3, 4]
    shared.free()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(shared.fds[0])


def test_a_kind_without_shared_memory_says_so() -> None:
    device = TorchDevice.__new__(TorchDevice)
    device.traits = CpuDevice.traits

    with pytest.raises(RuntimeError, match=r"^cpu does not share memory with child processes$"):
        device.share_memory(1)
    with pytest.raises(RuntimeError, match=r"^cpu does not share memory with child processes$"):
        device.map_shared("", (), 1)


def test_npu_memory_is_shared_mapped_and_counted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch_npu's reductions do it: eight values in this order; seven and the mapper's device index go back in."""
    shared: dict[bytes, Any] = {}
    calls: list[tuple[object, ...]] = []

    def share(storage: Any) -> tuple[object, ...]:
        shared[b"key\xff"] = storage
        return (0, b"key\xff", storage.nbytes(), 512, b"/counter", 7, b"event\x00", True)

    def new(*given: object) -> Any:
        calls.append(given)
        return shared[b"key\xff"]

    monkeypatch.setattr(torch.UntypedStorage, "_share_npu_", share, raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_npu", new, raising=False)
    monkeypatch.setattr(
        torch.UntypedStorage, "_release_ipc_counter_npu", lambda *given: calls.append(given), raising=False
    )

    memory = share_npu_memory(1_000, torch.device("cpu"))
    mapped = map_npu_memory(memory.handle, 1_000, torch.device("cpu", 0))
    mapped.fill_(3)
    memory.free()

    assert memory.tensor.sum() == 3_000
    assert calls == [(0, b"key\xff", 1_000, 512, b"/counter", 7, b"event\x00", True), (b"/counter", 7)]
