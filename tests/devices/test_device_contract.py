"""The contract of every Device: the interface of devices/interface.py."""

import threading

import pytest
import torch

from devices.device_pool import DevicePool
from devices.interface import Device
from devices.table import find_kind
from wire.errors import ConfigError
from wire.kv_layout import KvTensor, PoolLayout

LAYOUT = PoolLayout(
    [KvTensor(0, "k", 2, 4, "float32"), KvTensor(0, "v", 2, 6, "bfloat16")], num_blocks=5, block_size=16
)  # fmt: skip


def test_a_device_has_a_name_of_its_kind_and_a_description(device: Device) -> None:
    name = device.name

    assert name.partition(":")[0] == device.traits.kind
    assert device.describe().startswith(f"{name}: ")
    assert "\n" not in device.describe()


def test_tensors_are_on_the_devices_torch_device(device: Device) -> None:
    made = torch.arange(4, device=device.torch_device)

    assert made.device.type == device.torch_device.type
    assert made.cpu().tolist() == [0, 1, 2, 3]


def test_part_of_a_devices_memory_is_free(device: Device) -> None:
    memory = device.memory()

    assert 0 < memory.free <= memory.total


def test_an_event_is_done_after_a_wait(device: Device) -> None:
    event = device.event()
    event.record()
    event.wait()
    event.synchronize()

    assert event.is_done


def test_a_device_works_in_another_thread_once_activated(device: Device) -> None:
    made: list[list[float]] = []

    def work() -> None:
        device.activate()
        event = device.event()
        made.append((torch.ones(3, device=device.torch_device) * 2).tolist())
        event.record()
        event.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=300)

    assert made == [[2.0] * 3]


def test_work_on_another_stream_is_visible_after_an_event(device: Device) -> None:
    enter, event = device.new_stream(), device.event()
    with enter():
        made = torch.full((4,), 7, device=device.torch_device)
        event.record()
    event.wait()

    device.synchronize()
    assert made.tolist() == [7] * 4


def test_a_device_reports_peak_memory(device: Device) -> None:
    kept = [torch.zeros(1 << 20, dtype=torch.uint8, device=device.torch_device)]
    ran: list[str] = []

    def run() -> None:
        for _ in range(3):
            made = kept[0] + 1
            made = made[:10].clone()
        ran.append("run")

    took = device.peak_bytes(run)

    assert ran == ["run"]
    if device.traits.pools_on_host:
        assert took == 0
    else:
        assert 1 << 20 <= took < 16 << 20
        assert device.peak_bytes(lambda: None) < 1 << 20


def test_a_pool_has_the_layouts_size_and_the_kinds_alignment(device: Device) -> None:
    pool = device.make_pool(LAYOUT)

    assert pool.layout is LAYOUT
    if device.traits.pools_on_host:
        assert pool.fd is not None
        assert len(pool.buffer) == LAYOUT.total_bytes
    else:
        assert isinstance(pool, DevicePool)
        assert pool.fd is None
        assert pool.device == device.name
        assert (pool.tensor.dtype, pool.tensor.numel()) == (torch.uint8, LAYOUT.total_bytes)
        assert pool.tensor.data_ptr() % device.traits.pool_alignment == 0
        with pytest.raises(TypeError, match=f"{device.name} has no host buffer"):
            _ = pool.buffer
    pool.close()


def test_a_pool_can_be_closed_twice_and_not_used_after(device: Device) -> None:
    pool = device.make_pool(LAYOUT)
    pool.close()
    pool.close()

    with pytest.raises(ValueError, match="closed" if isinstance(pool, DevicePool) else "released"):
        _ = pool.tensor if isinstance(pool, DevicePool) else pool.buffer[:1]


def test_a_pool_waits_for_its_newest_event_if_there_is_one(accelerator: Device) -> None:
    pool = accelerator.make_pool(LAYOUT)
    assert isinstance(pool, DevicePool)

    pool.ready()
    pool.written()
    pool.tensor.fill_(1)
    pool.written()
    pool.ready()

    assert pool.tensor[-1].item() == 1
    pool.close()


def test_a_pool_that_does_not_fit_is_refused_with_its_bytes(device: Device) -> None:
    layout = PoolLayout(
        [KvTensor(0, "k", 2**20, 2**20, "float32")], num_blocks=2, block_size=16
    )  # the whole address space

    with pytest.raises(ConfigError, match=str(layout.total_bytes)):
        device.make_pool(layout)


def test_a_device_captures_graphs_or_declares_it_cannot(device: Device) -> None:
    if device.captures_graphs:
        buffer = torch.zeros(2, device=device.torch_device)

        def run() -> None:
            buffer.add_(1)

        graph = device.capture(run)
        before = buffer.tolist()
        graph.replay()
        assert buffer.tolist() == [value + 1 for value in before]
    else:
        with pytest.raises(RuntimeError, match=f"{device.traits.kind} does not support graph capture"):
            device.capture(lambda: None)


def test_a_devices_traits_equal_those_of_its_kind_in_the_product(device: Device) -> None:
    traits = device.traits

    assert traits.block_size % 16 == 0
    assert traits.pool_alignment & (traits.pool_alignment - 1) == 0
    if traits.kind in ("cpu", "cuda", "npu"):
        assert find_kind(traits.kind).traits == traits
