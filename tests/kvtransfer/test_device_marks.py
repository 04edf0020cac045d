"""An engine that launches all layers ahead: each frame waits for the mark of its own layer, and for no later one."""

import itertools
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from devices import table
from devices.device_pool import DevicePool
from kvtransfer import transport_table
from kvtransfer.link_ops import Put, merge_puts
from kvtransfer.outgoing_tickets import OutgoingTickets
from tests.devices.fake_device import FakeDevice, FakeKind
from tests.kvtransfer import rig as rigs
from tests.kvtransfer.devices import FakeDriver, FakeHost, offer_cuda_ipc
from tests.kvtransfer.every_transport import EVERY_TRANSPORT
from tests.kvtransfer.rig import DEADLINE_S, Rig, address, fill, make_rig, read, until
from wire.kv_layout import PoolLayout

P_BLOCKS, D_BLOCKS, NUM_TOKENS, NUM_LAYERS = (3, 9, 4, 5, 20), (7, 8, 30, 2, 11), 18, 3

_numbers = itertools.count()  # of the devices: two ends of a group never lie on one


class Mark:
    """An event that is reached when the test says so; a thread that waits for it stands in for its stream."""

    def __init__(self, device: "AheadDevice") -> None:
        self._device, self._reached, self.is_recorded, self.num_queries = device, threading.Event(), False, 0

    def record(self) -> None:
        self.is_recorded = True

    def wait(self) -> None:
        assert self.is_recorded
        self._device.waited_for.append(self._device.marks.index(self))
        assert self._reached.wait(DEADLINE_S), "the mark was never reached"

    def synchronize(self) -> None:
        self.wait()

    @property
    def is_done(self) -> bool:
        self.num_queries += 1
        return self._reached.is_set()

    def reach(self) -> None:
        self._reached.set()


@dataclass
class AheadDevice(FakeDevice):
    """A device whose work is done when the test says so. Owner of its marks, in their order."""

    marks: list[Mark] = field(default_factory=list)
    waited_for: list[int] = field(default_factory=list)

    def event(self) -> Mark:  # type: ignore[override]
        self.marks.append(Mark(self))
        return self.marks[-1]


class MarkedPool(DevicePool):
    """The product's pool of a device; `buffer` is for tests alone."""

    def __init__(self, layout: PoolLayout, seals: int = 0) -> None:
        self.ahead = AheadDevice(next(_numbers))
        super().__init__(layout, self.ahead)

    @property
    def buffer(self) -> memoryview:
        if sys._getframe(1).f_globals["__name__"].startswith("kvtransfer"):
            return super().buffer
        return memoryview(self.tensor.numpy())  # type: ignore[arg-type]


@pytest.fixture(params=["cuda_ipc", *(one for one in EVERY_TRANSPORT if one.values[0] != "shm")])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    makers, names = offer_cuda_ipc(FakeDriver(FakeHost()))
    monkeypatch.setattr(transport_table, "_MAKERS", makers)
    monkeypatch.setattr(transport_table, "NAMES", names)
    monkeypatch.setattr(rigs, "Pool", MarkedPool)
    monkeypatch.setitem(table.KINDS, "fake", FakeKind())
    return str(request.param)


@pytest.fixture(params=[True, False], ids=["digests", "no-digests"])
def rig(transport: str, request: pytest.FixtureRequest) -> Iterator[Rig]:
    with make_rig(transport, digests=request.param) as made:
        yield made


def compute(rig: Rig, layer: int, tokens: dict[int, bytes]) -> None:
    """Write a layer's KV, as its kernels do just before its mark is reached."""
    pool = rig.p_pool
    for tensor in pool.layout.tensors_of(layer):
        size = len(tokens[tensor]) // NUM_TOKENS
        for token in range(NUM_TOKENS):
            where = address(pool.layout, tensor, P_BLOCKS, token)
            pool.buffer[where] = tokens[tensor][token * size : (token + 1) * size]


def test_a_layers_frames_wait_for_its_mark_and_for_no_later_one(rig: Rig) -> None:
    tokens = fill(rig.p_pool, P_BLOCKS, NUM_TOKENS)
    pool: MarkedPool = rig.p_pool  # type: ignore[assignment]
    pool.tensor.fill_(0xEE)  # nothing is computed yet
    layer_bytes = sum(map(len, tokens.values())) // NUM_LAYERS
    ticket = rig.open(NUM_TOKENS, D_BLOCKS)

    rig.sender.begin(ticket)
    for layer in range(NUM_LAYERS):  # the engine's thread, which nothing blocks
        pool.written()
        rig.sender.put(ticket.ticket_id, layer, 0, NUM_TOKENS, P_BLOCKS)
    rig.sender.commit(ticket.ticket_id, b"prompt")
    for layer, mark in enumerate(pool.ahead.marks):
        compute(rig, layer, tokens)
        mark.reach()
        until(lambda layer=layer: rig.receiver.bytes_received == (layer + 1) * layer_bytes)  # type: ignore[misc]
    rig.events.wait("acked", ticket.ticket_id)

    assert read(rig.d_pool, D_BLOCKS, NUM_TOKENS) == tokens
    assert pool.ahead.waited_for == sorted(pool.ahead.waited_for)
    is_read_here = rig.digests or rig.transport != "cuda_ipc"  # else D alone reads the pool, and marks only are polled
    assert set(pool.ahead.waited_for) == (set(range(NUM_LAYERS)) if is_read_here else set())
    assert all(mark.num_queries for mark in pool.ahead.marks)
    assert rig.d_pool.ahead.marks == []  # type: ignore[attr-defined]


def test_complete_puts_are_merged_and_others_wait_alone() -> None:
    device = AheadDevice()
    marks = [device.event() for _ in range(4)]
    for mark in marks:
        mark.record()
    waiting = [Put("aa" * 16, (layer,), 0, 4, (1,), mark) for layer, mark in enumerate(marks)]

    alone = merge_puts(waiting)
    marks[0].reach()
    marks[1].reach()
    some = merge_puts(waiting)
    marks[2].reach()
    marks[3].reach()
    joined = merge_puts(waiting)

    assert alone == waiting
    assert some == [Put("aa" * 16, (0, 1), 0, 4, (1,), marks[1]), *waiting[2:]]
    assert joined == [Put("aa" * 16, (0, 1, 2, 3), 0, 4, (1,), marks[3])]


def test_chunks_of_a_layer_are_merged_once_the_later_one_is_complete() -> None:
    device = AheadDevice()
    marks = [device.event() for _ in range(2)]
    waiting = [Put("aa" * 16, (0,), 4 * number, 4 * number + 4, (1, 2), mark) for number, mark in enumerate(marks)]

    alone = merge_puts(waiting)
    for mark in marks:
        mark.reach()

    assert alone == waiting
    assert merge_puts(waiting) == [Put("aa" * 16, (0,), 0, 8, (1, 2), marks[1])]


@pytest.mark.parametrize("transport", ["tcp", "cuda_ipc"], indirect=True)
def test_a_mark_that_is_never_reached_ends_the_link_with_a_reason(transport: str) -> None:
    with make_rig(transport, progress_timeout_s=1.0) as rig:
        fill(rig.p_pool, P_BLOCKS, NUM_TOKENS)
        ticket = rig.open(NUM_TOKENS, D_BLOCKS)

        rig.sender.begin(ticket)
        rig.p_pool.written()  # type: ignore[attr-defined]
        rig.sender.put(ticket.ticket_id, 0, 0, NUM_TOKENS, P_BLOCKS)
        rig.events.wait("failed", ticket.ticket_id)
        rig.events.wait("ended", ticket.ticket_id)

        words = "is lost: the KV to be sent was not computed within 1 s"
        assert words in str(rig.events.failures[ticket.ticket_id])
        assert rig.p_pool.ahead.waited_for == []  # type: ignore[attr-defined]  # no stream waits for it either


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_leases_are_checked_while_a_mark_is_awaited(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, check_leases = itertools.count(1), OutgoingTickets.check_leases
    last = [0]

    def counted(self: OutgoingTickets) -> None:
        last[0] = next(looks)
        check_leases(self)

    monkeypatch.setattr(OutgoingTickets, "check_leases", counted)
    with make_rig(transport) as rig:
        fill(rig.p_pool, P_BLOCKS, NUM_TOKENS)
        pool: MarkedPool = rig.p_pool  # type: ignore[assignment]
        ticket = rig.open(NUM_TOKENS, D_BLOCKS)
        rig.sender.begin(ticket)
        pool.written()
        for layer in range(NUM_LAYERS):
            rig.sender.put(ticket.ticket_id, layer, 0, NUM_TOKENS, P_BLOCKS)
        rig.sender.commit(ticket.ticket_id, b"prompt")
        (mark,) = pool.ahead.marks

        until(lambda: mark.num_queries > 5)  # the link's thread waits for it
        before = last[0]
        until(lambda: last[0] > before + 2)
        mark.reach()

        rig.events.wait("acked", ticket.ticket_id)


@pytest.mark.parametrize("transport", ["tcp", "cuda_ipc"], indirect=True)
def test_a_resent_frame_waits_for_no_later_mark(transport: str) -> None:
    with make_rig(transport, failpoints="kv.send.mid=corrupt@1") as rig:
        tokens = fill(rig.p_pool, P_BLOCKS, NUM_TOKENS)
        pool: MarkedPool = rig.p_pool  # type: ignore[assignment]
        ticket = rig.open(NUM_TOKENS, D_BLOCKS)
        rig.sender.begin(ticket)
        pool.written()
        pool.ahead.marks[0].reach()
        for layer in range(NUM_LAYERS):
            rig.sender.put(ticket.ticket_id, layer, 0, NUM_TOKENS, P_BLOCKS)
        pool.written()  # of another prompt's layers, and never reached
        rig.sender.commit(ticket.ticket_id, b"prompt")
        rig.events.wait("acked", ticket.ticket_id)

        assert rig.events.acks[ticket.ticket_id].resent_frames == 1
        assert set(pool.ahead.waited_for) == {0}
        assert read(rig.d_pool, D_BLOCKS, NUM_TOKENS) == tokens
