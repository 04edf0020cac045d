"""Without digests no one detects that blocks changed during a read: the sender confirms that it held them."""

import secrets
import threading
from collections.abc import Callable, Iterator
from unittest.mock import ANY

import pytest

from kvtransfer import shm, transport_table
from kvtransfer.digest import RegionRuns, StopFlag, digest_of
from kvtransfer.link_messages import Abort, Ack, Commit, Frame, Held, Open, Read, TicketMessage
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender_ticket import SenderState
from kvtransfer.terms import seal_of
from kvtransfer.ticket_table import TicketTable
from kvtransfer.transport_interface import Inlet
from tests.kvtransfer import rig as rigs
from tests.kvtransfer.devices import DevicePool, FakeDriver, FakeHost, offer_cuda_ipc
from tests.kvtransfer.every_transport import EVERY_TRANSPORT
from tests.kvtransfer.rank_rig import make_rank_rig, random_kv
from tests.kvtransfer.rig import DEADLINE_S, RawSender, Rig, Tokens, fill, make_rig, read, until
from wire.types import Ticket

BLOCKS = (10, 11, 12, 13, 14)
THE_OTHERS = [
    pytest.param(*one.values, digests, marks=one.marks)
    for one in EVERY_TRANSPORT
    for digests in (False, True)
    if (*one.values, digests) != ("shm", False)  # which asks
]
Answers = list[tuple[KvReceiver, int, TicketMessage]]


class Gate:
    """Holds every thread until it is opened."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def pass_by(self) -> None:
        self.reached.set()
        assert self._open.wait(DEADLINE_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def slow_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """The receiver pauses before each read from the sender's pool."""
    gate, real = Gate(), shm.ShmInlet.move

    def move(self: shm.ShmInlet, frame: Frame, target: RegionRuns, stop: StopFlag) -> int | None:
        gate.pass_by()
        return real(self, frame, target, stop)

    monkeypatch.setattr(shm.ShmInlet, "move", move)
    yield gate
    gate.open()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """The receivers' answers, by link."""
    reason: Answers = []
    answer_through(monkeypatch, lambda receiver, link, message: reason.append((receiver, link, message)))
    return reason


def answer_through(
    monkeypatch: pytest.MonkeyPatch, look: Callable[[KvReceiver, int, TicketMessage], object]
) -> Callable[[KvReceiver, int, TicketMessage], None]:
    """Pass every answer to `look` first; if that returns "kept", it is not sent. Returns a function that sends it."""
    real = KvReceiver._answer

    def answer(self: KvReceiver, link: int, message: TicketMessage) -> None:
        if look(self, link, message) != "kept":
            real(self, link, message)

    monkeypatch.setattr(KvReceiver, "_answer", answer)
    return real


def sender_state(rig: Rig, ticket: Ticket) -> SenderState | None:
    """The state of the sender's half, on its only link."""
    (link,) = rig.sender._routes.links(ticket.ticket_id)
    sending = None if link._tickets is None else link._tickets._tickets.get(ticket.ticket_id)
    return None if sending is None else sending.ticket.state


def raw_hand_over(rig: Rig, raw: RawSender, ticket: Ticket, tokens: Tokens) -> None:
    """All messages of a sender until it is acked."""
    raw.say(Open(ticket.ticket_id, ticket.epoch, ticket.num_tokens, 0))
    seals = kv_bytes = 0
    for number in range(len(tokens)):
        frame, payload = raw.frame(ticket, number, number, tokens)
        raw.announce(frame, payload)
        seals, kv_bytes = seals + seal_of(frame), kv_bytes + frame.num_bytes
    digest = digest_of([b"raw"])
    raw.say(Commit(ticket.ticket_id, ticket.epoch, len(tokens), kv_bytes, seals % 2**64, digest, b"raw"))


def num_held(receivers: list[KvReceiver]) -> int:
    """The number of links of all shares whose receipt has arrived."""
    inflows = [
        inflow
        for receiver in receivers
        for ticket in list(receiver._table._tickets.values())
        for inflow in ticket._inflows.values()
    ]
    return sum(inflow.complete and not inflow.owes_receipt for inflow in inflows)


@pytest.mark.parametrize("digests", [False, True])
def test_kv_read_after_its_blocks_were_freed_is_not_committed(digests: bool, slow_reader: Gate) -> None:
    with make_rig("shm", digests=digests, clocks_apart=True) as rig:
        fill(rig.p_pool, range(5), 20)
        ticket = rig.open(20, BLOCKS)
        rig.hand_over(ticket, range(5))
        assert slow_reader.reached.wait(DEADLINE_S)
        until(lambda: sender_state(rig, ticket) is SenderState.SENT)

        rig.sender_clock.now += 31.0  # nobody acked for a lease
        rig.events.wait("failed", ticket.ticket_id)
        fill(rig.p_pool, range(5), 20, seed=99)  # the blocks are another prompt's
        slow_reader.open()
        rig.events.wait("ended", ticket.ticket_id)

        assert ticket.ticket_id not in rig.events.commits
        assert "the lease of 30 s expired" in str(rig.events.failures[ticket.ticket_id])


@pytest.fixture(params=["shm", "cuda_ipc"])
def pool_reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A transport whose receiver reads the sender's pool; `cuda_ipc` over CPU tensors."""
    if request.param == "cuda_ipc":
        makers, names = offer_cuda_ipc(FakeDriver(FakeHost()))
        monkeypatch.setattr(transport_table, "_MAKERS", makers)
        monkeypatch.setattr(transport_table, "NAMES", names)
        monkeypatch.setattr(rigs, "Pool", DevicePool)
    return str(request.param)


def hand_over(rig: Rig) -> tuple[str, int]:
    """Hand off 20 tokens and check that they arrive; return the ticket's id and epoch."""
    tokens = fill(rig.p_pool, range(5), 20)
    ticket = rig.open(20, BLOCKS)
    rig.hand_over(ticket, range(5))
    rig.events.wait("acked", ticket.ticket_id)
    assert read(rig.d_pool, BLOCKS, 20) == tokens
    return ticket.ticket_id, ticket.epoch


def test_a_hand_off_without_digests_is_acked_after_one_receipt(pool_reader: str, answers: Answers) -> None:
    with make_rig(pool_reader, digests=False) as rig:
        about = hand_over(rig)

        assert [message for _, _, message in answers] == [Read(*about), Ack(*about)]


@pytest.mark.parametrize(("transport", "digests"), THE_OTHERS)
def test_no_receipt_is_requested_with_digests_or_streams(transport: str, digests: bool, answers: Answers) -> None:
    with make_rig(transport, digests=digests) as rig:
        hand_over(rig)

        assert not any(isinstance(message, Read) for _, _, message in answers)


def test_a_prompt_of_which_nothing_was_read_needs_no_receipt(answers: Answers) -> None:
    with make_rig("shm", digests=False) as rig:
        ticket = rig.open(8, (10, 11), first_token=8)

        rig.hand_over(ticket, range(2))
        rig.events.wait("acked", ticket.ticket_id)

        assert [type(message) for _, _, message in answers] == [Ack]


def test_only_the_requested_receipt_commits() -> None:
    with make_rig("shm", digests=False) as rig:
        tokens = fill(rig.p_pool, range(5), 20)
        ticket, never = rig.open(20, BLOCKS), rig.open(4, (20,))
        raw, other = RawSender(rig), RawSender(rig, link_epoch=10)
        mine = Held(ticket.ticket_id, ticket.epoch)

        raw.say(mine)  # before it is opened
        raw.say(Open(ticket.ticket_id, ticket.epoch, 20, 0))
        raw.say(mine)  # and before all is in
        raw_hand_over(rig, raw, ticket, tokens)
        assert raw.receive() == Read(ticket.ticket_id, ticket.epoch)
        other.say(mine)
        raw.say(Held(ticket.ticket_id, ticket.epoch + 1))
        raw.say(Held(secrets.token_hex(16), ticket.epoch))
        raw.say(Held(never.ticket_id, never.epoch))
        for one in (raw, other):  # both links have processed it once this is answered
            unknown_id = secrets.token_hex(16)
            one.say(Open(unknown_id, ticket.epoch, 4, 0))
            answer = one.receive()
            assert isinstance(answer, Abort)
            assert answer.ticket_id == unknown_id
        assert not rig.events.reports

        for _ in range(3):
            raw.say(mine)
        assert raw.receive() == Ack(ticket.ticket_id, ticket.epoch)
        rig.events.wait("committed", ticket.ticket_id)
        raw.say(Open(never.ticket_id, never.epoch, 4, 0))
        raw.say(Abort(never.ticket_id, never.epoch, "Cancelled", "enough"))
        rig.events.wait("ended", never.ticket_id)

        assert rig.events.reports == [("committed", ticket.ticket_id), ("ended", never.ticket_id)]
        assert read(rig.d_pool, BLOCKS, 20) == tokens
        for one in (raw, other):
            one.stream.close()


def test_a_sender_that_owes_its_receipt_has_a_lease_for_it() -> None:
    with make_rig("shm", digests=False) as rig:
        tokens = fill(rig.p_pool, range(5), 20)
        ticket, raw = rig.open(20, BLOCKS), RawSender(rig)
        raw_hand_over(rig, raw, ticket, tokens)
        assert raw.receive() == Read(ticket.ticket_id, ticket.epoch)

        rig.clock.now += 29.0
        rig.receiver.sweep()
        assert not rig.events.ends
        rig.clock.now += 2.0
        rig.receiver.sweep()
        rig.events.wait("ended", ticket.ticket_id)
        raw.say(Held(ticket.ticket_id, ticket.epoch))

        assert "no renewal within the lease of 30 s" in rig.events.ends[ticket.ticket_id][1]
        assert isinstance(raw.receive(), Abort)
        assert not rig.events.commits
        raw.stream.close()


def test_a_sender_whose_lease_ran_out_answers_the_question_with_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[KvReceiver, int, TicketMessage]] = []

    def look(*answer: object) -> str:
        if isinstance(answer[2], Read):
            requests.append(answer)  # type: ignore[arg-type]
            return "kept"
        return ""

    send = answer_through(monkeypatch, look)
    with make_rig("shm", digests=False, clocks_apart=True) as rig:
        fill(rig.p_pool, range(5), 20)
        ticket = rig.open(20, BLOCKS)
        rig.hand_over(ticket, range(5))
        until(lambda: bool(requests))

        rig.sender_clock.now += 31.0
        send(*requests[0])
        rig.events.wait("failed", ticket.ticket_id)
        rig.events.wait("ended", ticket.ticket_id)

        assert not rig.events.commits
        assert not rig.events.acks


def test_a_query_about_an_uncommitted_ticket_is_answered_by_abort(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[TicketMessage] = []
    real = TicketTable.handle

    def handle(self: TicketTable, link: int, message: TicketMessage, inlet: Inlet) -> None:
        received.append(message)
        real(self, link, message, inlet)

    monkeypatch.setattr(TicketTable, "handle", handle)
    with make_rig("shm", digests=False) as rig:
        fill(rig.p_pool, range(5), 20)
        ticket, open_one = rig.open(20, BLOCKS), rig.open(20, range(20, 25))
        rig.sender.begin(open_one)
        rig.hand_over(ticket, range(5))
        rig.events.wait("acked", ticket.ticket_id)
        link = next(link for _, link, _ in answers)

        rig.receiver._answer(link, Read(open_one.ticket_id, open_one.epoch))
        rig.events.wait("failed", open_one.ticket_id)
        rig.events.wait("ended", open_one.ticket_id)
        received.clear()
        rig.receiver._answer(link, Read(ticket.ticket_id, ticket.epoch))
        until(lambda: bool(received))

        assert received == [Abort(ticket.ticket_id, ticket.epoch, "HandoffFailed", ANY)]
        assert "blocks are held only when all is sent" in str(rig.events.failures[open_one.ticket_id])
        assert [kind for kind, one in rig.events.reports if one == ticket.ticket_id] == ["committed", "acked"]


@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(2, 2), (2, 1), (1, 2), (4, 2)])
def test_every_link_acknowledges_before_any_rank_commits(
    p_ranks: int, d_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: Answers = []

    def look(receiver: KvReceiver, link: int, message: TicketMessage) -> str:
        if not isinstance(message, Read):
            return ""
        requests.append((receiver, link, message))
        return "kept"

    send = answer_through(monkeypatch, look)
    with make_rank_rig("shm", p_ranks=p_ranks, d_ranks=d_ranks, digests=False) as rig:
        kv = random_kv(rig.tensors, 40)
        rig.fill(kv, (4, 2, 9))
        ticket = rig.open(40, (1, 5, 3))
        num_links = sum(len(sender._receivers_of(d_ranks)) for sender in rig.senders)

        rig.hand_over(ticket, (4, 2, 9))
        until(lambda: len(requests) == num_links)
        for question in requests[1:]:
            send(*question)
        table = requests[0][0]._table
        until(lambda: num_held(rig.receivers) == num_links - 1)
        assert not rig.events.reports
        assert table._tickets
        send(*requests[0])
        rig.events.wait("acked", ticket.ticket_id)

        assert len(requests) == num_links == len({(id(receiver), link) for receiver, link, _ in requests})
        rig.check(kv, (1, 5, 3))


@pytest.mark.parametrize("withheld", [0, 1])
def test_a_rank_without_its_receipt_ends_the_ticket_on_all(withheld: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = threading.Event()

    def look(receiver: KvReceiver, link: int, message: TicketMessage) -> str:
        if isinstance(message, Read) and receiver._memory.layout.rank.number == withheld:
            kept.set()
            return "kept"
        return ""

    answer_through(monkeypatch, look)
    with make_rank_rig("shm", p_ranks=2, d_ranks=2, digests=False) as rig:
        kv = random_kv(rig.tensors, 40)
        rig.fill(kv, (4, 2, 9))
        ticket = rig.open(40, (1, 5, 3))
        rig.hand_over(ticket, (4, 2, 9))
        assert kept.wait(DEADLINE_S)

        rig.clock.now += 31.0
        rig.receiver.sweep()
        rig.events.wait("ended", ticket.ticket_id)
        rig.events.wait("failed", ticket.ticket_id)

        assert not rig.events.commits
        assert not rig.events.acks
