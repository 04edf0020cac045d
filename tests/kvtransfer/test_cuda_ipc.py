"""What is specific to cuda_ipc, over a driver in this process; the contract of transports is test_device_contract."""

import ctypes
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvtransfer import cuda_driver, shm, transport_table
from kvtransfer.cuda_driver import CudaDriver, CudaPool
from kvtransfer.cuda_handles import PoolHandles, decode_handles, encode_handles
from kvtransfer.cuda_ipc import CudaIpcInlet, CudaIpcTransport
from kvtransfer.digest import Region, RegionRuns, StopFlag, digest_of
from kvtransfer.hello import Hello
from kvtransfer.link_codec import PREFIX, WireError
from kvtransfer.link_messages import Frame
from kvtransfer.mover import process_mover
from kvtransfer.slots import window
from kvtransfer.staging import whole
from tests.kvtransfer import rig as rigs
from tests.kvtransfer.devices import DevicePool, FakeDriver, FakeHost, FakeOpened, offer_cuda_ipc
from tests.kvtransfer.rig import DEADLINE_S, TENSORS, Pool, Rig, endpoint_of, fill, make_rig, read, until
from wire.errors import HandoffFailed
from wire.kv_layout import PoolLayout
from wire.types import PROTOCOL_VERSION, KvEndpoint

ROOT = Path(__file__).parents[2]
LAYOUT = PoolLayout(TENSORS, num_blocks=8, block_size=4)
HELLO = Hello(PROTOCOL_VERSION, "p", 5, 9, "d", 77, "cuda_ipc", 4, 8, TENSORS, digests=True)
P_BLOCKS, D_BLOCKS = (3, 9, 4, 5, 20, 1), (7, 8, 30, 2, 11, 50)


class Lying(FakeDriver):
    """Exports a pool with one field of its description changed."""

    def __init__(self, host: FakeHost, **changes: object) -> None:
        super().__init__(host)
        self._changes = changes

    def export(self, pool: torch.Tensor) -> PoolHandles:
        return super().export(pool)._replace(**self._changes)  # type: ignore[arg-type]


class OnDevices(FakeDriver):
    """Records the devices that open a pool."""

    def __init__(self, host: FakeHost) -> None:
        super().__init__(host)
        self.opened: list[str] = []

    def open(self, handles: PoolHandles, device: str) -> FakeOpened:
        self.opened.append(device)
        return super().open(handles, device)


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


@contextmanager
def cuda_rig(
    monkeypatch: pytest.MonkeyPatch, *drivers: FakeDriver, names: tuple[str, ...] = ("cuda_ipc",)
) -> Iterator[Rig]:
    """A rig whose receiver has the first driver and whose sender has the last."""
    left = iter((drivers[0], drivers[-1]))
    makers, known = offer_cuda_ipc(None)
    makers["cuda_ipc"] = lambda memory: CudaIpcTransport(memory, next(left))
    monkeypatch.setattr(transport_table, "_MAKERS", makers)
    monkeypatch.setattr(transport_table, "NAMES", known)
    monkeypatch.setattr(rigs, "Pool", DevicePool)
    with make_rig("cuda_ipc", sender_transports=names, receiver_transports=names) as made:
        yield made


def hand_over(rig: Rig) -> str:
    """Hand over 20 tokens and check them; return the transport that took them."""
    tokens, ticket = fill(rig.p_pool, P_BLOCKS, 20), rig.open(20, D_BLOCKS)

    rig.hand_over(ticket, P_BLOCKS)
    rig.events.wait("acked", ticket.ticket_id)

    assert read(rig.d_pool, D_BLOCKS, 20) == tokens
    return rig.events.acks[ticket.ticket_id].transport


def test_the_receivers_own_device_opens_the_pool(monkeypatch: pytest.MonkeyPatch, host: FakeHost) -> None:
    """The sender's may be invisible to it, as each rank sees only its own."""
    driver = OnDevices(host)
    with cuda_rig(monkeypatch, driver, FakeDriver(host)) as rig:
        rig.p_pool.device = "cuda:1"  # type: ignore[attr-defined]
        assert hand_over(rig) == "cuda_ipc"

        assert driver.opened == [rig.d_pool.device] == ["cpu"]  # type: ignore[attr-defined]


def test_the_pool_is_unmapped_when_the_link_ends(monkeypatch: pytest.MonkeyPatch, host: FakeHost) -> None:
    with cuda_rig(monkeypatch, FakeDriver(host)) as rig:
        hand_over(rig)
        assert host.opened == 1

        rig.sender.close()

        until(lambda: host.opened == 0)


@pytest.mark.parametrize(
    ("sender", "words"),
    [
        ({"num_bytes": LAYOUT.total_bytes + 1}, f"{LAYOUT.total_bytes + 1} bytes, but its layout"),
        ({"memory": bytes(64)}, "cannot be opened: invalid resource handle"),
        ({"offset": 1 << 63}, f"bytes at {1 << 63} are not in an allocation of"),
    ],
)
def test_a_pool_that_cannot_be_opened_falls_back(
    monkeypatch: pytest.MonkeyPatch, host: FakeHost, sender: dict[str, object], words: str
) -> None:
    with cuda_rig(monkeypatch, FakeDriver(host), Lying(host, **sender), names=("cuda_ipc", "tcp")) as rig:
        assert hand_over(rig) == "tcp"

        (link,) = rig.sender.links()
        assert words in str(link)
        assert host.opened == 0


def test_another_host_is_unreachable(host: FakeHost) -> None:
    transport = CudaIpcTransport(DevicePool(LAYOUT), FakeDriver(host))

    assert transport.unreachable(KvEndpoint("cuda_ipc", "name", "boot/1", 0)) == "another host or network namespace"
    assert transport.unreachable(KvEndpoint("cuda_ipc", "name", shm.host_id(), 0)) is None


def test_the_receivers_endpoint_is_a_unix_socket_of_this_host(monkeypatch: pytest.MonkeyPatch, host: FakeHost) -> None:
    with cuda_rig(monkeypatch, FakeDriver(host)) as rig:
        endpoint = endpoint_of(rig, "cuda_ipc")

        assert endpoint.address.startswith("pdserve-kv-")
        assert endpoint.host_id == shm.host_id()


def test_set_up_is_80_bytes_of_fixed_fields() -> None:
    handles = PoolHandles(1 << 33, 4096, b"m" * 64)

    body = encode_handles(handles)[PREFIX.size :]

    assert body == struct.pack("!QQ", 1 << 33, 4096) + b"m" * 64
    assert decode_handles(body) == handles
    for wrong in (b"", body[:-1], body + b"\0"):
        with pytest.raises(WireError, match=f"malformed SETUP of {len(wrong)} bytes, expected 80"):
            decode_handles(wrong)


def test_a_peers_pool_is_never_a_target(host: FakeHost) -> None:
    pool, driver = DevicePool(LAYOUT), FakeDriver(host)
    inlet = CudaIpcInlet(driver.open(driver.export(pool.tensor), "cpu"), HELLO)
    slots = inlet._slots
    assert slots is not None
    theirs = slots.place(0, window((1, 2), 4, 0, 8))
    mine = RegionRuns(Region(bytes(theirs.runs.num_bytes)), 0, whole(theirs.runs.num_bytes))

    with pytest.raises(ValueError, match="read-only"):
        process_mover().copy(mine, theirs, StopFlag())


@pytest.mark.parametrize("blocks", [(1,), (1, 8), (1, 4_000_000_000)])
def test_blocks_that_do_not_hold_the_tokens_are_refused(host: FakeHost, blocks: tuple[int, ...]) -> None:
    pool, driver = DevicePool(LAYOUT), FakeDriver(host)
    inlet, size = CudaIpcInlet(driver.open(driver.export(pool.tensor), "cpu"), HELLO), 8 * TENSORS[0].token_bytes
    frame = Frame("ab" * 16, 1, 0, 0, 0, 0, 8, 0, 2, size, digest_of([bytes(size)]), blocks)

    with pytest.raises(HandoffFailed, match=rf"frame 0 cannot be read: its tokens are \[0, 8\), .* is {len(blocks)}"):
        inlet.move(frame, RegionRuns(Region(bytearray(size)), 0, whole(size)), StopFlag())


def test_a_missing_part_is_reported_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_pool = SimpleNamespace(device=torch.device("cuda:0"))
    host_pool = Pool(LAYOUT)

    assert CudaIpcTransport(host_pool).unusable() == "the KV pool is host memory"
    assert CudaIpcTransport(DevicePool(LAYOUT)).unusable() == "the KV pool is on cpu, but cuda_ipc supports only CUDA"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert CudaDriver().lacking(cuda_pool) == "torch sees no CUDA device"  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "kvtransfer.cuda_driver", None)
    lacking = CudaIpcTransport(DevicePool(LAYOUT)).unusable() or ""
    assert "torch cannot be imported" in lacking
    host_pool.close()


def test_a_host_pool_is_refused_without_torch() -> None:
    code = (
        "import sys; from tests.kvtransfer.rig import *; from kvtransfer.cuda_ipc import CudaIpcTransport;"
        "assert CudaIpcTransport(Pool(PoolLayout(TENSORS, num_blocks=1, block_size=4))).unusable();"
        "assert 'torch' not in sys.modules"
    )

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=3 * DEADLINE_S, check=False).returncode == 0


class FakeLibrary:
    """libcuda.so.1 with one allocation of 1,000 bytes at `base`; opening it records the flags."""

    def __init__(self, base: int = 5_000) -> None:
        self._base, self.calls = base, list[object]()

    def cuMemGetAddressRange_v2(self, base: object, size: object, address: ctypes.c_uint64) -> int:
        if not self._base <= address.value < self._base + 1_000:
            return 1
        base._obj.value, size._obj.value = self._base, 1_000  # type: ignore[attr-defined]
        return 0

    def cuIpcOpenMemHandle_v2(self, base: object, handle: ctypes.Structure, flags: int) -> int:
        base._obj.value = self._base  # type: ignore[attr-defined]
        self.calls.append(flags)
        return 0

    def cuIpcCloseMemHandle(self, base: ctypes.c_uint64) -> int:
        self.calls.append(base.value)
        return 0

    def cuIpcGetMemHandle(self, handle: object, address: ctypes.c_uint64) -> int:
        handle._obj.reserved[:] = address.value.to_bytes(64, "big")  # type: ignore[attr-defined]
        return 0

    def cuGetErrorString(self, status: int, text: object) -> int:
        text._obj.value = b"invalid argument"  # type: ignore[attr-defined]
        return 0


def test_the_handle_is_of_the_whole_allocation_with_an_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_library", FakeLibrary)
    pool = SimpleNamespace(data_ptr=lambda: 5_300)

    assert cuda_driver._handle_of(pool) == ((5_000).to_bytes(64, "big"), 300)  # type: ignore[arg-type]


def test_a_mapping_is_memory_of_the_device_that_opened_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peer access is enabled with it, and no library needs to know which device holds it: NCCL's transport/p2p.cc."""
    allocation = torch.arange(1_000, dtype=torch.int16).to(torch.uint8)
    library, contexts = FakeLibrary(allocation.data_ptr()), list[torch.device]()

    def context(device: torch.device) -> AbstractContextManager[None]:
        contexts.append(device)
        return nullcontext()

    monkeypatch.setattr(cuda_driver, "_library", lambda: library)
    monkeypatch.setattr(cuda_driver, "_context", context)

    pool = CudaDriver().open(PoolHandles(100, 20, bytes(64)), "cpu")

    assert isinstance(pool, CudaPool)
    assert pool.tensor.data_ptr() == allocation.data_ptr() + 20
    assert torch.equal(pool.tensor, allocation[20:120])
    pool.close()
    pool.close()
    assert library.calls == [1, allocation.data_ptr()]
    assert contexts == [torch.device("cpu")] * 2
    with pytest.raises(OSError, match="100 bytes at 901 are not in an allocation of 1000 bytes"):
        CudaDriver().open(PoolHandles(100, 901, bytes(64)), "cpu")


def test_a_refusal_of_the_driver_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_library", FakeLibrary)

    with pytest.raises(OSError, match=r"cuMemGetAddressRange_v2: invalid argument \(1\)"):
        cuda_driver._allocation_of(7_000)
