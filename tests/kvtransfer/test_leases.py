"""A slow peer is not a dead one: progress keeps a ticket alive, a standstill ends it within a lease."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import pytest

from kvtransfer.digest import RegionRuns, StopFlag
from kvtransfer.link_messages import Abort, Ack, Frame, MessageType, Nack, Open, Read
from kvtransfer.link_ops import Begin, FinishTicket, LinkSettings, MessageReceived, Put
from kvtransfer.outbox import Outbox
from kvtransfer.outgoing_tickets import OutgoingTickets
from kvtransfer.sender_ticket import MAX_WAIT_LEASES, SenderState, SenderTicket
from kvtransfer.stream import Stream
from kvtransfer.tcp import TcpInlet, TcpOutlet
from kvtransfer.terms import RankHeads, Terms
from kvtransfer.transport_interface import Timeouts
from processes.failpoints import Failpoints
from tests.faults.proxy import FaultProxy, Message
from tests.kvtransfer.rank_rig import RankRig, make_rank_rig, random_kv
from tests.kvtransfer.rig import (
    DEADLINE_S,
    TENSORS,
    Clock,
    Pool,
    RawSender,
    Recorder,
    Rig,
    endpoint_of,
    fill,
    make_rig,
    read,
    until,
)
from wire.errors import NoCapacity
from wire.kv_layout import Heads, KvTensor, PoolLayout
from wire.types import KvEndpoint, Ticket

LEASE_S = 9.0
BLOCKS = (10, 11, 12, 13, 14)


class Turnstile:
    """Lets one frame of the last rank of D through for each turn."""

    def __init__(self, patch: pytest.MonkeyPatch, rig: RankRig) -> None:
        self._turns, self.free = threading.Semaphore(0), threading.Event()
        slow, real = rig.receivers[-1], TcpInlet.move

        def move(inlet: TcpInlet, frame: Frame, target: RegionRuns, stop: StopFlag) -> int | None:
            if threading.current_thread() in [link.thread for link in slow._links.values()]:
                while not self._turns.acquire(timeout=0.02) and not self.free.is_set() and not stop.is_set():
                    pass
            return real(inlet, frame, target, stop)

        patch.setattr(TcpInlet, "move", move)
        self._slow = slow

    def turn(self) -> None:
        before = self._slow.bytes_received
        self._turns.release()
        until(lambda: self._slow.bytes_received > before)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankRig]:
    monkeypatch.setattr("kvtransfer.link.merge_puts", list)  # many frames, however slowly they go
    with make_rank_rig("tcp", p_ranks=1, d_ranks=2, lease_s=LEASE_S) as rig:
        yield rig


def _hand_over(rig: RankRig) -> Ticket:
    """Hand over 200 tokens and wait until the first rank of D has its share."""
    kv = random_kv(rig.tensors, 200)
    rig.fill(kv, range(13))
    ticket = rig.open(200, range(13))
    rig.hand_over(ticket, range(13), chunk=10)
    until(lambda: rig.receivers[0]._table._tickets[ticket.ticket_id].committing)
    return ticket


def _renewed_at(rig: RankRig, ticket: Ticket) -> list[float]:
    sendings = [link._tickets for link in rig.senders[0]._routes.links(ticket.ticket_id)]
    return [0.0 if one is None else one._tickets[ticket.ticket_id].renewed_at for one in sendings]


def test_a_finished_link_waits_for_a_slower_one_beyond_a_lease(ranks: RankRig, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Turnstile(monkeypatch, ranks)
    ticket = _hand_over(ranks)

    for _ in range(6):
        slow.turn()
        ranks.clock.now += 4.0
        ranks.receiver.sweep()
        until(lambda: _renewed_at(ranks, ticket) == [ranks.clock.now] * 2)
        ranks.sender.sweep()
    slow.free.set()
    ranks.events.wait("acked", ticket.ticket_id)

    assert ranks.events.count("failed") == 0


def test_a_finished_link_waits_only_a_lease_for_a_silent_one(ranks: RankRig, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Turnstile(monkeypatch, ranks)
    ticket = _hand_over(ranks)
    slow.turn()
    ranks.clock.now += 4.0
    ranks.receiver.sweep()
    until(lambda: _renewed_at(ranks, ticket) == [ranks.clock.now] * 2)
    notified_at = ranks.clock.now

    ranks.clock.now += 4.0  # the slow share's lease has a second left
    ranks.receiver.sweep()
    assert _renewed_at(ranks, ticket) == [notified_at] * 2
    assert ranks.events.reports == []
    ranks.clock.now = notified_at + LEASE_S
    ranks.sender.sweep()
    ranks.events.wait("failed", ticket.ticket_id)
    slow.free.set()

    assert "the lease of 9 s" in str(ranks.events.failures[ticket.ticket_id])
    ranks.events.wait("ended", ticket.ticket_id)


def test_endless_progress_reports_do_not_hold_blocks_forever() -> None:
    part = RankHeads((KvTensor(0, "k", 1, 2, "float16"),), (Heads(0, 1),))
    ticket = SenderTicket("ab" * 16, 7, Terms(part, 4, 4), lease_s=LEASE_S, now=0.0)
    assert ticket.commit(b"", 0) is not None
    now = 0.0

    while not ticket.expire(now):
        ticket.receiver_renewed(now)
        now += LEASE_S / 2

    assert MAX_WAIT_LEASES * LEASE_S <= now <= (MAX_WAIT_LEASES + 1) * LEASE_S


def test_before_the_commit_the_receivers_messages_renew_nothing() -> None:
    part = RankHeads((KvTensor(0, "k", 1, 2, "float16"),), (Heads(0, 1),))
    ticket = SenderTicket("ab" * 16, 7, Terms(part, 0, 4), lease_s=LEASE_S, now=0.0)

    ticket.receiver_renewed(LEASE_S - 1)

    assert ticket.expire(LEASE_S)


class Trickle:
    """A fault that lets the payload of one frame through in steps: the `nth`, or the first after a PROBE."""

    def __init__(self, nth: int | None) -> None:
        self.nth, self._steps, self.num_steps = nth, threading.Semaphore(0), 8
        self._probed = False

    def __call__(self, message: Message) -> Iterable[bytes]:
        yield message.head
        is_slow = message.kind is MessageType.FRAME and (self._probed or message.number == self.nth)
        self._probed = message.kind is MessageType.PROBE
        size = -(-len(message.payload) // self.num_steps)
        for at in range(0, len(message.payload), max(size, 1)):
            if is_slow:
                assert self._steps.acquire(timeout=DEADLINE_S)
            yield message.payload[at : at + size]

    def step(self) -> None:
        self._steps.release()

    def slow_steps(self, rig: Rig, received: Callable[[], int], seconds: float) -> Iterator[None]:
        """All steps but the last, each this much later; D checks its leases before each `yield`, P after it."""
        for _ in range(self.num_steps - 1):
            before = received()
            self.step()
            until(lambda before=before: received() > before)  # type: ignore[misc]
            rig.clock.now += seconds
            rig.receiver.sweep()
            yield
            rig.sender.sweep()
            until(lambda: _tended_at(rig) == {rig.clock.now})


def _through(rig: Rig, proxy: FaultProxy, blocks: tuple[int, ...] = BLOCKS) -> Ticket:
    """A ticket of 20 tokens that goes through the proxy."""
    made = rig.open(20, blocks)
    near = KvEndpoint("tcp", proxy.address)
    return Ticket(made.ticket_id, made.epoch, made.instance_id, 20, 0, made.lease_s, (near,))


def test_a_slow_frame_keeps_its_ticket_and_those_behind_it_alive() -> None:
    trickle = Trickle(0)
    with make_rig("tcp", lease_s=LEASE_S) as rig, FaultProxy(endpoint_of(rig, "tcp").address, trickle) as proxy:
        tokens = fill(rig.p_pool, range(5), 20)
        behind = _through(rig, proxy)
        rig.sender.begin(behind)
        ticket = _through(rig, proxy)
        rig.hand_over(ticket, range(5))
        (link,) = _moving(rig)

        for _ in trickle.slow_steps(rig, link, 0.7 * LEASE_S):
            until(lambda: _is_open(rig, ticket))
        assert rig.events.reports == []
        trickle.step()
        rig.events.wait("acked", ticket.ticket_id)

        assert read(rig.d_pool, BLOCKS, 20) == tokens
        assert rig.events.count("ended") == rig.events.count("failed") == 0


def test_a_commit_behind_a_slow_frame_keeps_its_ticket_alive() -> None:
    trickle = Trickle(None)
    with make_rig("tcp", lease_s=LEASE_S) as rig, FaultProxy(endpoint_of(rig, "tcp").address, trickle) as proxy:
        tokens = fill(rig.p_pool, range(5), 20)
        done, slow = _through(rig, proxy), _through(rig, proxy, (20, 21, 22, 23, 24))
        rig.sender.begin(done)
        rig.sender.begin(slow)
        rig.put_all(done, range(5))
        until(lambda: rig.receiver.bytes_received == sum(map(len, tokens.values())))
        trickle.nth = sum(message.kind is MessageType.FRAME for message in proxy.recorded)
        rig.hand_over(slow, range(5))
        (link,) = _moving(rig)
        rig.sender.commit(done.ticket_id, b"prompt")
        until(lambda: _state_on_p(rig, done) is SenderState.SENT)

        for _ in trickle.slow_steps(rig, link, 0.5 * LEASE_S):
            until(lambda: _is_open(rig, done))
        assert rig.events.reports == []
        trickle.step()
        rig.events.wait("acked", done.ticket_id)
        rig.events.wait("acked", slow.ticket_id)

        assert rig.events.count("ended") == rig.events.count("failed") == 0


def test_a_slow_probe_ends_no_ticket_of_its_link() -> None:
    trickle = Trickle(None)
    with make_rig("tcp", lease_s=LEASE_S) as rig, FaultProxy(endpoint_of(rig, "tcp").address, trickle) as proxy:
        fill(rig.p_pool, range(5), 20)
        ticket, measured = _through(rig, proxy), list[object]()
        rig.sender.begin(ticket)
        until(lambda: bool(rig.receiver._table._tickets[ticket.ticket_id].links))
        rig.sender.start_measure("decode-0", 77, ticket.endpoints, 1 << 16, 1e9, measured.append)
        (link,) = _moving(rig)

        for _ in trickle.slow_steps(rig, link, 0.5 * LEASE_S):
            pass
        assert rig.events.reports == []
        for _ in range(100 * trickle.num_steps):
            trickle.step()
        until(lambda: bool(measured))
        rig.put_all(ticket, range(5))
        rig.sender.commit(ticket.ticket_id, b"prompt")
        rig.events.wait("acked", ticket.ticket_id)


def test_a_frame_that_stalls_ends_its_ticket_within_a_lease() -> None:
    trickle = Trickle(0)
    with make_rig("tcp", lease_s=LEASE_S) as rig, FaultProxy(endpoint_of(rig, "tcp").address, trickle) as proxy:
        ticket = _through(rig, proxy)
        rig.hand_over(ticket, range(5))
        (link,) = _moving(rig)
        before = link()
        rig.clock.now += 0.7 * LEASE_S  # first: the receiver's own sweeper may see the bytes before this one does
        trickle.step()
        until(lambda: link() > before)
        rig.receiver.sweep()

        rig.receiver.sweep(rig.clock.now + 0.9 * LEASE_S)
        assert not rig.receiver._table._tickets[ticket.ticket_id].over
        rig.receiver.sweep(rig.clock.now + LEASE_S)
        for _ in range(trickle.num_steps):
            trickle.step()

        rig.events.wait("ended", ticket.ticket_id)
        rig.events.wait("failed", ticket.ticket_id)


def _moving(rig: Rig) -> list[Callable[[], int]]:
    """The counts of bytes of the links that are in the middle of a frame, of which only the head has arrived."""
    arrivals = rig.receiver._table._arrivals
    until(lambda: bool(arrivals._seen))
    return [arrivals._received[link] for link in arrivals._seen]


def _state_on_p(rig: Rig, ticket: Ticket) -> SenderState:
    (link,) = rig.sender._routes.links(ticket.ticket_id)
    assert link._tickets is not None
    return link._tickets._tickets[ticket.ticket_id].ticket.state


def _tended_at(rig: Rig) -> set[float]:
    """When P's links last checked their leases: each does so on its own thread."""
    links = [link for peer in rig.sender._peers.values() for link in peer.links()]
    return {link._tickets._checked_at for link in links if link._tickets is not None}


def _is_open(rig: Rig, ticket: Ticket) -> bool:
    (link,) = rig.sender._routes.links(ticket.ticket_id)
    return link._tickets is not None and link._tickets._tickets[ticket.ticket_id].renewed_at == rig.clock.now


class Narrow:
    """A stream whose peer accepts a send in steps, each of them most of a lease after the one before."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.num_steps, self.sent = clock, 0, b""

    def send(self, pieces: Iterable[bytes | memoryview], progressed: Callable[[], None] | None = None) -> None:
        for _ in range(self.num_steps):
            self._clock.now += 0.7 * LEASE_S
            assert progressed is not None
            progressed()
        self.sent += b"".join(bytes(piece) for piece in pieces)


class OneLink:
    """The tickets of a link over a `Narrow` stream."""

    def __init__(self, catch_up: Callable[[], bool] | None = None) -> None:
        self.clock, self.events, self.age, self.is_open = Clock(), Recorder(), 0.0, True
        self.pool = Pool(PoolLayout(TENSORS, num_blocks=16, block_size=4))
        self.stream = Narrow(self.clock)
        self.outbox = Outbox(cast(Stream, self.stream))
        settings = LinkSettings(
            instance_id="prefill-0", epoch=55, memory=self.pool, transports=(), events=self.events,
            acked=self.events.acked, claim=lambda ticket_id: True, is_open=lambda ticket_id: self.is_open,
            catch_up=catch_up, clock=self.clock, progress_age=lambda: self.age, failpoints=Failpoints.parse(""),
            timeouts=Timeouts(), check_interval_s=0.5, digests=True,
        )  # fmt: skip
        self.sendings = OutgoingTickets(settings, self.outbox, TcpOutlet(), "tcp", True)

    def begin(self, number: int) -> str:
        ticket_id = f"{number:032x}"
        self.sendings.handle(Begin(Ticket(ticket_id, 77, "decode-0", 8, 0, LEASE_S, ())))
        return ticket_id

    def put(self, ticket_id: str) -> None:
        for layer in range(3):
            self.sendings.handle(Put(ticket_id, (layer,), 0, 8, (1, 2)))

    def flush(self, num_steps: int) -> None:
        """Send what is queued, in that many steps; then check the leases."""
        self.stream.num_steps = num_steps
        self.outbox.flush()
        self.stream.num_steps = 0
        self.sendings.check_leases()


@pytest.fixture
def one_link() -> Iterator[OneLink]:
    made = OneLink()
    yield made
    made.pool.close()


@pytest.mark.parametrize("committed", [False, True])
def test_a_send_longer_than_a_lease_keeps_its_ticket(one_link: OneLink, committed: bool) -> None:
    ticket_id, behind = one_link.begin(1), one_link.begin(2)
    one_link.put(ticket_id)
    if committed:
        one_link.sendings.handle(FinishTicket(ticket_id, b"prompt"))

    one_link.flush(4)

    assert one_link.events.reports == []
    one_link.age = LEASE_S  # the engine stands still, and nothing leaves any more
    one_link.clock.now += LEASE_S
    one_link.sendings.check_leases()
    assert sorted(one_link.events.failures) == [ticket_id, behind]


def test_another_tickets_bytes_keep_no_waiting_ticket_alive(one_link: OneLink) -> None:
    done, busy = one_link.begin(1), one_link.begin(2)
    one_link.put(done)
    one_link.sendings.handle(FinishTicket(done, b"prompt"))
    one_link.flush(0)
    one_link.put(busy)

    one_link.flush(4)

    assert [*one_link.events.failures] == [done]


def test_a_stalled_engine_loses_tickets_without_any_frame(one_link: OneLink) -> None:
    busy, idle = one_link.begin(1), one_link.begin(2)
    one_link.put(busy)
    one_link.age = LEASE_S

    one_link.flush(4)

    assert [*one_link.events.failures] == [idle]


def test_a_rank_confirms_no_blocks_that_rank_0_has_freed() -> None:
    """Rank 0's abort is still in the rank's socket when the receiver asks whether the blocks were held."""

    def catch_up() -> bool:
        link.is_open = False
        return True

    link = OneLink(catch_up)
    ticket_id = link.begin(1)
    link.put(ticket_id)
    link.flush(0)
    sent = len(link.stream.sent)

    link.sendings.handle(MessageReceived(Read(ticket_id, 77)))
    link.flush(0)

    assert len(link.stream.sent) == sent
    link.pool.close()


def test_after_the_receivers_abort_queued_frames_are_not_sent(one_link: OneLink) -> None:
    ticket_id = one_link.begin(1)
    one_link.sendings.note(Abort(ticket_id, 77, "HandoffFailed", "over on D"))

    one_link.put(ticket_id)

    assert one_link.sendings.bytes_sent == 0


def test_an_abort_after_a_queued_commit_wins_with_its_reason(
    one_link: OneLink,
) -> None:
    ticket_id = one_link.begin(1)
    abort = Abort(ticket_id, 77, "NoCapacity", "D has no room")
    one_link.sendings.note(abort)

    one_link.put(ticket_id)
    one_link.sendings.handle(FinishTicket(ticket_id, b"prompt"))
    one_link.sendings.handle(MessageReceived(abort))

    assert [*one_link.events.failures] == [ticket_id]
    assert type(one_link.events.failures[ticket_id]) is NoCapacity
    assert str(one_link.events.failures[ticket_id]) == "D has no room"


def test_an_ack_delayed_by_a_long_put_ends_no_lease(one_link: OneLink) -> None:
    ticket_id = one_link.begin(1)
    one_link.put(ticket_id)
    one_link.sendings.handle(FinishTicket(ticket_id, b"prompt"))
    one_link.flush(0)

    one_link.sendings.note(Ack(ticket_id, 77))
    one_link.clock.now += 2 * LEASE_S
    one_link.sendings.check_leases()

    assert one_link.events.reports == []


def test_bytes_sent_after_a_wait_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair()
    near, far, reported = (
        Stream(one, progress_timeout_s=30.0),
        Stream(other, progress_timeout_s=30.0),
        threading.Event(),
    )
    waits, wait = threading.Event(), near._wait_writable

    def report_and_wait(deadline: float) -> None:
        waits.set()
        wait(deadline)

    monkeypatch.setattr(near, "_wait_writable", report_and_wait)
    data, full = bytes(4 << 20), 0
    with contextlib.suppress(BlockingIOError):
        while True:
            full += one.send(bytes(1 << 16))
    sending = threading.Thread(target=near.send, args=([data], reported.set))
    sending.start()
    assert waits.wait(DEADLINE_S)

    far.drain(full + len(data))
    sending.join(DEADLINE_S)

    assert reported.is_set()
    assert far.bytes_received == full + len(data)
    for stream in (near, far):
        stream.close()


def _nacked(rig: Rig) -> tuple[Ticket, RawSender, tuple[Frame, bytes]]:
    """A frame whose blocks belong to another prompt by now: the receiver requests it again."""
    tokens = fill(rig.p_pool, range(5), 20)
    ticket, raw = rig.open(20, BLOCKS), RawSender(rig)
    raw.say(Open(ticket.ticket_id, ticket.epoch, 20, 0))
    frame, payload = raw.frame(ticket, 0, 0, tokens)
    fill(rig.p_pool, range(5), 20, seed=9)
    raw.announce(frame, bytes(len(payload)))
    assert raw.receive() == Nack(ticket.ticket_id, ticket.epoch, 0)
    return ticket, raw, (frame, payload)


def _end_here(rig: Rig, ticket: Ticket, how: str) -> None:
    """The receiver ends the ticket by itself: its sender has not sent anything yet."""
    if how == "the lease":
        until(lambda: not rig.receiver._table._arrivals._seen)  # NACK may come before the frame counts as arrived
        rig.receiver.sweep(rig.clock.now + 31)
    else:
        rig.receiver.abort(ticket.ticket_id, "the first token ended everything, says the scheduler")
    rig.events.wait("ended", ticket.ticket_id)


HERE = ("the lease", "the receiver")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("how", ["the sender", *HERE])
def test_a_frame_of_freed_blocks_is_dropped_not_corrupt(transport: str, how: str) -> None:
    with make_rig(transport) as rig:
        ticket, raw, _ = _nacked(rig)
        if how in HERE:
            _end_here(rig, ticket, how)
        raw.say(Abort(ticket.ticket_id, ticket.epoch, "Cancelled", "it was over before"))
        until(lambda: rig.receiver.counts.dropped_frames == 1)
        raw.stream.shutdown()
        until(lambda: not rig.receiver._links)

        assert rig.receiver.counts.corrupt_frames == 0
        raw.stream.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("how", ["nobody", *HERE])
def test_a_resent_frame_was_corrupt_even_if_the_ticket_ended(transport: str, how: str) -> None:
    with make_rig(transport) as rig:
        ticket, raw, (frame, payload) = _nacked(rig)
        if how in HERE:
            _end_here(rig, ticket, how)
        fill(rig.p_pool, range(5), 20)
        raw.announce(frame, payload)
        until(lambda: rig.receiver.counts.corrupt_frames == 1)
        raw.say(Abort(ticket.ticket_id, ticket.epoch, "Cancelled", "now it is over"))
        raw.stream.shutdown()
        until(lambda: not rig.receiver._links)

        assert rig.receiver.counts.corrupt_frames == 1
        raw.stream.close()


@pytest.mark.parametrize("how", ["nobody", *HERE])
def test_an_unresent_frame_counts_as_corrupt_if_the_link_is_lost(how: str) -> None:
    with make_rig("shm") as rig:
        ticket, raw, _ = _nacked(rig)
        if how in HERE:
            _end_here(rig, ticket, how)
        raw.stream.shutdown()
        until(lambda: rig.receiver.counts.corrupt_frames == 1)

        assert rig.receiver.counts.dropped_frames == 0
        assert rig.receiver._table._suspects._by_link == {}
        raw.stream.close()
