"""A ticket that its caller dropped is never committed: its blocks may belong to another prompt when they are sent."""

import threading
from collections.abc import Iterator

import pytest

from kvtransfer.far_rank import FarRank
from kvtransfer.framing import FrameRange
from kvtransfer.link import Link
from kvtransfer.link_ops import Drop, Put, TicketOp
from kvtransfer.outgoing_tickets import OutgoingTickets
from kvtransfer.rank_messages import RankMessage
from kvtransfer.sender_ticket import SenderState, SenderTicket
from kvtransfer.slots import BlockWindow
from processes.rank_channel import Channel, Message
from tests.kvtransfer.every_transport import EVERY_TRANSPORT
from tests.kvtransfer.rank_rig import make_rank_rig, random_kv
from tests.kvtransfer.rig import DEADLINE_S, Rig, fill, make_rig, read, until
from wire.errors import InstanceLost
from wire.kv_layout import KvTensor
from wire.types import Ticket

P_BLOCKS, D_BLOCKS = range(5), (10, 11, 12, 13, 14)
ONE_TENSOR = (KvTensor(0, "k", 2, 8, "float32"),)  # its rows lie in one piece, which `tcp` sends from the pool itself
CARRIED = [one for one in EVERY_TRANSPORT if one.values[0] != "shm"]


class Gate:
    """Holds the link's thread at one place until it is opened."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def pass_by(self) -> None:
        self._reached.set()
        assert self._open.wait(DEADLINE_S)

    def wait(self) -> None:
        """Wait until a thread is there."""
        assert self._reached.wait(DEADLINE_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


def _reuse_blocks(rig: Rig) -> None:
    fill(rig.p_pool, P_BLOCKS, 20, seed=99)


def _abort_at(gate: Gate, rig: Rig) -> Ticket:
    """Hand over a ticket, and abort it and reuse its blocks while the link's thread is at the gate."""
    ticket = rig.open(20, D_BLOCKS)
    rig.hand_over(ticket, P_BLOCKS)
    gate.wait()
    rig.sender.abort(ticket.ticket_id, "the client went away")
    _reuse_blocks(rig)
    gate.open()
    return ticket


@pytest.mark.parametrize("transport", EVERY_TRANSPORT)
@pytest.mark.parametrize("digests", [False, True])
def test_frames_digested_after_an_abort_are_never_committed(
    transport: str, digests: bool, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = OutgoingTickets._send

    def wait_first(
        self: OutgoingTickets, ticket: SenderTicket, cut: FrameRange, where: BlockWindow, mark: None
    ) -> None:
        gate.pass_by()
        send(self, ticket, cut, where, mark)

    monkeypatch.setattr(OutgoingTickets, "_send", wait_first)
    with make_rig(transport, digests=digests) as rig:
        fill(rig.p_pool, P_BLOCKS, 20)
        ticket = _abort_at(gate, rig)
        rig.events.wait("ended", ticket.ticket_id)

        assert rig.events.ends[ticket.ticket_id] == (D_BLOCKS, "the client went away")
        assert [kind for kind, _ in rig.events.reports] == ["ended"]


@pytest.mark.parametrize("transport", CARRIED)
def test_without_digests_committed_kv_left_while_blocks_were_held(
    transport: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_leases = OutgoingTickets.check_leases

    def wait_first(self: OutgoingTickets) -> None:
        if any(sending.ticket.state is SenderState.SENT for sending in self._tickets.values()):
            gate.pass_by()  # the commit is made; what waits for the end of this turn goes out after it
        check_leases(self)

    monkeypatch.setattr(OutgoingTickets, "check_leases", wait_first)
    with make_rig(transport, digests=False, tensors=ONE_TENSOR) as rig:
        tokens = fill(rig.p_pool, P_BLOCKS, 20)
        ticket = _abort_at(gate, rig)
        rig.events.wait("committed", ticket.ticket_id)

        assert read(rig.d_pool, D_BLOCKS, 20) == tokens


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_ticket_fails_once_if_its_link_is_lost_meanwhile(
    transport: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = OutgoingTickets.handle

    def wait_first(self: OutgoingTickets, op: TicketOp, *, more_queued: bool = False) -> None:
        if isinstance(op, Put):
            gate.pass_by()
        handle(self, op, more_queued=more_queued)

    monkeypatch.setattr("kvtransfer.outbox._BATCH_PIECES", 1)  # as if a batch had room for one message only
    monkeypatch.setattr(OutgoingTickets, "handle", wait_first)
    with make_rig(transport) as rig:
        ticket = rig.open(20, D_BLOCKS)
        rig.sender.begin(ticket)
        rig.sender.put(ticket.ticket_id, 0, 0, 21, range(6))  # one token more than the ticket has: it is to be aborted
        gate.wait()
        (link,) = rig.sender._routes.links(ticket.ticket_id)
        assert link._stream is not None

        link._stream.shutdown()
        gate.open()
        rig.events.wait("failed", ticket.ticket_id)

        assert isinstance(rig.events.failures[ticket.ticket_id], InstanceLost)
        until(lambda: link.state == "down")
        assert rig.events.count("failed") == 1


@pytest.mark.parametrize("digests", [False, True])
def test_a_far_rank_commits_nothing_that_rank_0_dropped_before(
    digests: bool, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, handle, say, take = OutgoingTickets._send, OutgoingTickets.handle, Channel.send, FarRank._take
    received = threading.Event()  # set when the rank asks to commit; until then the drop does not reach its links

    def wait_first(
        self: OutgoingTickets, ticket: SenderTicket, cut: FrameRange, where: BlockWindow, mark: None
    ) -> None:
        if self._settings.memory.layout.rank.number:
            gate.pass_by()
        send(self, ticket, cut, where, mark)

    def handle_late(self: OutgoingTickets, op: TicketOp, *, more_queued: bool = False) -> None:
        if isinstance(op, Drop):
            assert received.wait(DEADLINE_S)
        handle(self, op, more_queued=more_queued)

    def send_late(self: "Channel[RankMessage]", kind: RankMessage, payload: bytes, *, timeout_s: float) -> None:
        if kind == RankMessage.ABORT:
            assert received.wait(DEADLINE_S)
        say(self, kind, payload, timeout_s=timeout_s)

    def requested(self: FarRank, message: "Message[RankMessage]") -> None:
        if message.kind == RankMessage.CATCH_UP and gave_away.is_set():
            received.set()
        take(self, message)

    gave_away = threading.Event()
    monkeypatch.setattr(OutgoingTickets, "_send", wait_first)
    monkeypatch.setattr(OutgoingTickets, "handle", handle_late)
    monkeypatch.setattr(Channel, "send", send_late)
    monkeypatch.setattr(FarRank, "_take", requested)
    with make_rank_rig("tcp", p_ranks=2, d_ranks=2, far=True, digests=digests) as rig:
        ticket = rig.open(20, (1, 2))
        rig.hand_over(ticket, (3, 4))
        gate.wait()
        (link,) = rig.senders[0]._routes.links(ticket.ticket_id)
        until(lambda: _state(link, ticket.ticket_id) is SenderState.SENT)  # rank 0's part is committed

        rig.sender.abort(ticket.ticket_id, "the client went away")
        rig.fill(random_kv(rig.tensors, 20, seed=99), (3, 4))
        gave_away.set()
        gate.open()
        until(lambda: received.is_set() or rig.events.count("committed") > 0)
        received.set()
        rig.events.wait("ended", ticket.ticket_id)

        assert [kind for kind, _ in rig.events.reports] == ["ended"]
        assert not rig.lost


def _state(link: Link, ticket_id: str) -> SenderState | None:
    sending = link._tickets._tickets.get(ticket_id) if link._tickets is not None else None
    return None if sending is None else sending.ticket.state
