"""Whatever happens to messages between sender and receiver over TCP, wrong bytes never commit, and it is counted."""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest

from kvtransfer import outgoing_tickets
from kvtransfer.link_codec import FRAME_HEAD_BYTES, MAGIC, PREFIX, decode_prefix, encode
from kvtransfer.link_messages import MessageType
from kvtransfer.sender import KvSender
from tests.faults.proxy import Cut, Fault, FaultProxy, Message, faithful, replay
from tests.kvtransfer.rig import DEADLINE_S, Rig, Tokens, endpoint_of, fill, make_rig, read, until
from wire.types import PROTOCOL_VERSION, Ticket

P_BLOCKS = (3, 9, 4, 5, 20, 1)
D_BLOCKS = (7, 8, 30, 2, 11, 50)
NUM_TOKENS = 22
DESCRIPTION = b"the prompt"
FRAME, COMMIT, OPEN = MessageType.FRAME, MessageType.COMMIT, MessageType.OPEN


_TRIES = 5


@pytest.fixture(params=["apart"], autouse=True)
def frames(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each tensor is its own frame, as the faults between frames need it; with "shared", as on any small put."""
    if request.param == "apart":
        monkeypatch.setattr(outgoing_tickets, "FRAME_BYTES", 0)
    return str(request.param)


BOTH = pytest.mark.parametrize("frames", ["apart", "shared"], indirect=True)


@dataclass
class Passage:
    """A rig whose sender reaches the receiver through a proxy."""

    rig: Rig
    proxy: FaultProxy
    tokens: Tokens

    def hand_over(self) -> Ticket:
        """Start one hand-off of the contents of P_BLOCKS."""
        ticket = self.rig.open(NUM_TOKENS, D_BLOCKS)
        endpoint = replace(endpoint_of(self.rig, "tcp"), address=self.proxy.address)
        ticket = replace(ticket, endpoints=(endpoint,))
        self.rig.hand_over(ticket, P_BLOCKS, DESCRIPTION)
        return ticket

    def ended(self, ticket: Ticket) -> str:
        """Wait for the sender's outcome and return it; what committed is byte-exact, what did not is free."""
        events, ticket_id = self.rig.events, ticket.ticket_id
        reported = [report for report in events.reports if report[1] == ticket_id]
        assert self.is_over(ticket, within_s=DEADLINE_S), (
            f"only {reported} came, the last messages {self.last_messages()}"
        )
        reported = [report for report in events.reports if report[1] == ticket_id]
        assert {kind in ("committed", "ended") for kind, _ in reported} == {True, False}, reported
        if ticket_id in events.commits:
            description, block_ids, _ = events.commits[ticket_id]
            assert (description, block_ids) == (DESCRIPTION, D_BLOCKS)
            assert read(self.rig.d_pool, D_BLOCKS, NUM_TOKENS) == self.tokens
        assert len(reported) == 2, reported
        return "acked" if ticket_id in events.acks else "failed"

    def is_over(self, ticket: Ticket, *, within_s: float) -> bool:
        """Whether both sides ended it within this time."""
        events = self.rig.events
        with events.changed:
            return events.changed.wait_for(
                lambda: sum(report[1] == ticket.ticket_id for report in events.reports) == 2, within_s
            )

    def last_messages(self) -> list[tuple[str, int]]:
        """The last messages through the proxy, for a failure's message."""
        return [(message.kind.name, message.number) for message in self.proxy.recorded[-10:]]

    def let_leases_end(self) -> None:
        """Move the clock past every lease and let both sides read it."""
        self.rig.clock.now += 1000
        self.rig.receiver.sweep()
        self.rig.sender.sweep()

    def let_time_pass_until_over(self, ticket: Ticket) -> None:
        """Let leases end as often as necessary: a thread that was late reads its clock only after the next jump."""
        for _ in range(int(DEADLINE_S / 0.02)):
            if self.is_over(ticket, within_s=0.02):
                return
            self.let_leases_end()

    def works(self) -> bool:
        """Whether hand-offs arrive again once nothing disturbs; the first may still meet the end of the old link."""
        self.proxy.fault = faithful
        for _ in range(_TRIES):
            ticket = self.hand_over()
            until(lambda ticket=ticket: not self._is_open(ticket))  # type: ignore[misc]
            if ticket.ticket_id in self.rig.events.acks:
                return self.ended(ticket) == "acked"
            self.let_leases_end()
        return False

    def _is_open(self, ticket: Ticket) -> bool:
        return ticket.ticket_id not in {**self.rig.events.acks, **self.rig.events.failures}


class KvSenderBeside:
    """A second sender over the same pool, with its own links that bypass the proxy."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._sender = KvSender(
            rig.p_pool, instance_id="prefill-1", epoch=56, transports=("tcp",), events=rig.events, clock=rig.clock,
            progress_age=lambda: 0.0,
        )  # fmt: skip

    def __enter__(self) -> "KvSenderBeside":
        return self

    def __exit__(self, *exc: object) -> None:
        self._sender.close()

    def hand_over(self, ticket: Ticket) -> None:
        self._sender.begin(ticket)
        for layer in range(self._rig.p_pool.layout.num_layers):
            self._sender.put(ticket.ticket_id, layer, 0, NUM_TOKENS, P_BLOCKS)
        self._sender.commit(ticket.ticket_id, DESCRIPTION)


@contextmanager
def passage(fault: Fault = faithful, **settings: object) -> Iterator[Passage]:
    with make_rig("tcp", **settings) as rig, FaultProxy(endpoint_of(rig, "tcp").address, fault) as proxy:
        yield Passage(rig, proxy, fill(rig.p_pool, P_BLOCKS, NUM_TOKENS))


def on(kind: MessageType, nth: int, act: Callable[[Message], Iterable[bytes]]) -> Fault:
    """A fault on the `nth` message of a kind from now on, counted from 0; all others pass."""
    seen = itertools.count()

    def fault(message: Message) -> Iterable[bytes]:
        return act(message) if message.kind is kind and next(seen) == nth else faithful(message)

    return fault


def flip_in_head(bit: int) -> Callable[[Message], Iterable[bytes]]:
    return lambda message: [message.flipped(bit).data]


def test_without_faults_a_hand_off_arrives_through_the_proxy() -> None:
    with passage() as it:
        assert it.ended(it.hand_over()) == "acked"

        assert [message.kind for message in it.proxy.recorded if message.kind is FRAME] == [FRAME] * 6
        assert it.rig.receiver.counts.corrupt_frames == 0


@pytest.mark.parametrize("frames", ["shared"], indirect=True)
def test_neighbouring_tensors_go_through_it_in_one_frame() -> None:
    with passage() as it:
        assert it.ended(it.hand_over()) == "acked"

        sizes = [message.frame.num_tensors for message in it.proxy.recorded if message.kind is FRAME]
        assert sum(sizes) == 6
        assert min(sizes) >= 2


@BOTH
def test_a_flipped_bit_of_a_payload_costs_one_resend(frames: str) -> None:
    with passage(on(FRAME, 0 if frames == "shared" else 2, lambda m: [m.flipped(8 * len(m.head) + 77).data])) as it:
        assert it.ended(it.hand_over()) == "acked"

        assert it.rig.receiver.counts.corrupt_frames == 1


@BOTH
def test_a_payload_flipped_every_time_ends_the_ticket() -> None:
    def flip(message: Message) -> Iterable[bytes]:
        return [message.flipped(8 * len(message.head)).data] if message.kind is FRAME else faithful(message)

    with passage(flip) as it:
        assert it.ended(it.hand_over()) == "failed"

        assert it.rig.receiver.counts.corrupt_frames >= 2
        assert it.works()


HEAD_BITS = [
    (kind, 8 * byte + byte % 8)
    for kind, size in ((OPEN, 32), (FRAME, FRAME_HEAD_BYTES - PREFIX.size), (COMMIT, 52 + len(DESCRIPTION)))
    for byte in range(PREFIX.size + size)
]
"""One bit of every byte of three heads, each of the eight in turn."""


@BOTH
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.long)])
def test_a_flipped_bit_of_any_head_never_commits_wrong_bytes(step: int) -> None:
    with passage(progress_timeout_s=0.05) as it:
        for kind, bit in HEAD_BITS[::step]:
            it.proxy.fault = on(kind, 0, flip_in_head(bit))
            ticket = it.hand_over()
            it.let_time_pass_until_over(ticket)
            it.ended(ticket)

        assert len(it.rig.events.commits) < len(HEAD_BITS) // step // 4
        assert it.rig.receiver.counts.refused_connections > 0
        assert it.works()


@pytest.mark.parametrize("kind", [MessageType.ACK, MessageType.NACK])
def test_a_flipped_bit_in_an_answer_never_ends_a_ticket_twice(kind: MessageType) -> None:
    """Of an ACK; and of the NACK that a flipped payload costs."""
    with passage(progress_timeout_s=0.05) as it:
        for byte in range(PREFIX.size + (24 if kind is MessageType.ACK else 28)):
            it.proxy.back = _flip_answer(kind, 8 * byte + byte % 8)
            if kind is MessageType.NACK:
                it.proxy.fault = on(FRAME, 1, lambda message: [message.flipped(8 * len(message.head)).data])
            ticket = it.hand_over()
            it.let_time_pass_until_over(ticket)
            if it.ended(ticket) == "acked":
                assert ticket.ticket_id in it.rig.events.commits
        it.proxy.back = bytes
        assert it.works()


def _flip_answer(kind: MessageType, bit: int) -> Callable[[bytes], bytes]:
    """Turn one bit of the next answer of this kind."""
    mark = PREFIX.pack(MAGIC, PROTOCOL_VERSION, kind, 0, 0)[:8]
    found = itertools.count()

    def back(data: bytes) -> bytes:
        at = data.find(mark)
        if at < 0 or next(found):
            return data
        turned = bytearray(data)
        turned[at + bit // 8] ^= 1 << bit % 8
        return bytes(turned)

    return back


@pytest.mark.parametrize("kind", [OPEN, FRAME, COMMIT])
@pytest.mark.parametrize("how", ["close", "half", "reset"])
@pytest.mark.parametrize("part", [1, 90])
def test_a_truncated_message_ends_the_ticket_and_the_next_link_works(kind: MessageType, how: str, part: int) -> None:
    def truncate(message: Message) -> Iterator[bytes]:
        yield message.data[: min(part, len(message.data) - 1)]
        raise Cut(how)

    with passage(on(kind, 0, truncate)) as it:
        ticket = it.hand_over()
        until(lambda: ticket.ticket_id in it.rig.events.failures)
        if kind is OPEN:  # the receiver never received it
            it.let_leases_end()

        assert it.ended(ticket) == "failed"
        assert not it.rig.events.commits
        assert it.works()
        assert it.proxy.num_connections == 2


def test_repeated_messages_commit_once() -> None:
    def twice(message: Message) -> Iterable[bytes]:
        return [message.data] * 2 if message.kind in (OPEN, FRAME, COMMIT) else faithful(message)

    with passage(twice) as it:
        assert it.ended(it.hand_over()) == "acked"

        assert it.rig.receiver.counts.duplicate_frames + it.rig.receiver.counts.dropped_frames == 6
        assert it.works()


def test_frames_in_reverse_order_arrive() -> None:
    held: list[bytes] = []

    def reverse(message: Message) -> Iterable[bytes]:
        if message.kind is not FRAME:
            return faithful(message)
        held.insert(0, message.data)
        return held if len(held) == 6 else []

    with passage(reverse) as it:
        assert it.ended(it.hand_over()) == "acked"


def test_a_commit_before_its_frames_ends_the_ticket() -> None:
    held: list[bytes] = []

    def commit_first(message: Message) -> Iterable[bytes]:
        if message.kind is FRAME:
            held.append(message.data)
            return []
        return [message.data, *held] if message.kind is COMMIT else faithful(message)

    with passage(commit_first) as it:
        assert it.ended(it.hand_over()) == "failed"

        assert not it.rig.events.commits
        until(lambda: it.rig.receiver.counts.dropped_frames == 6)
        assert it.works()


def _swap(what: Callable[[Message, Message], tuple[bytes, bytes]]) -> Fault:
    """Exchange something between the first two frames, which are K and V of one layer."""
    held: list[Message] = []

    def fault(message: Message) -> Iterable[bytes]:
        if message.kind is not FRAME or len(held) == 2:
            return faithful(message)
        held.append(message)
        return what(*held) if len(held) == 2 else []

    return fault


def test_payloads_swapped_between_frames_are_detected_and_resent() -> None:
    with passage(_swap(lambda a, b: (a.head + b.payload, b.head + a.payload))) as it:
        assert it.ended(it.hand_over()) == "acked"

        assert it.rig.receiver.counts.corrupt_frames == 2


def test_frames_swapped_as_a_whole_are_only_out_of_order() -> None:
    with passage(_swap(lambda a, b: (b.data, a.data))) as it:
        assert it.ended(it.hand_over()) == "acked"

        assert it.rig.receiver.counts.corrupt_frames == 0


def _as(message: Message, **changes: int) -> bytes:
    """The message with another head."""
    return encode(replace(message.frame, **changes)) + message.payload  # type: ignore[arg-type]


def test_tensors_swapped_between_two_heads_never_commit() -> None:
    def exchange(a: Message, b: Message) -> tuple[bytes, bytes]:
        return _as(a, tensor=b.frame.tensor, layer=b.frame.layer), _as(b, tensor=a.frame.tensor, layer=a.frame.layer)

    with passage(_swap(exchange)) as it:
        assert it.ended(it.hand_over()) == "failed"

        assert not it.rig.events.commits
        assert it.works()


def test_late_messages_of_a_finished_ticket_have_no_effect() -> None:
    gate = threading.Event()

    def late(message: Message) -> Iterator[bytes]:
        assert gate.wait(DEADLINE_S)
        yield message.data

    with passage(on(FRAME, 3, late)) as it:
        first = it.hand_over()
        until(lambda: it.rig.receiver.counts.bytes_received > 0)
        it.rig.receiver.abort(first.ticket_id, "the scheduler gave it up")
        until(lambda: first.ticket_id in it.rig.events.ends)
        before = bytes(it.rig.d_pool.buffer)
        gate.set()
        until(lambda: it.rig.receiver.counts.dropped_frames == 3)

        assert bytes(it.rig.d_pool.buffer) == before
        assert it.ended(first) == "failed"
        assert it.works()


def test_a_recorded_stream_replayed_on_another_link_has_no_effect() -> None:
    with passage() as it:
        assert it.ended(it.hand_over()) == "acked"
        ended, bytes_received = list(it.rig.events.reports), it.rig.receiver.bytes_received
        before = bytes(it.rig.d_pool.buffer)

        answer = replay(it.proxy.target, [message.data for message in it.proxy.recorded])

        assert MessageType.ABORT in _kinds(answer)  # to OPEN; the COMMIT is known, and acked as any repeated one is
        assert it.rig.receiver.counts.dropped_frames == 6
        assert it.rig.events.reports == ended
        assert it.rig.receiver.bytes_received == bytes_received
        assert bytes(it.rig.d_pool.buffer) == before
        assert it.works()


def test_replaying_a_recorded_stream_commits_nothing_twice() -> None:
    with passage() as it:
        first = it.hand_over()
        assert it.ended(first) == "acked"
        again = [message.data for message in it.proxy.recorded if message.kind in (OPEN, FRAME, COMMIT)]
        it.proxy.fault = on(OPEN, 0, lambda message: [*again, message.data])

        assert it.ended(it.hand_over()) == "acked"
        assert it.rig.events.reports.count(("committed", first.ticket_id)) == 1
        assert it.rig.receiver.counts.dropped_frames == 6


def test_messages_of_a_foreign_ticket_are_dropped_and_counted() -> None:
    """Another rig's sender's messages about its own ticket arrive on this link."""
    with passage() as other:
        assert other.ended(other.hand_over()) == "acked"
        foreign = [message.data for message in other.proxy.recorded if message.kind in (FRAME, COMMIT)]
    with passage(on(FRAME, 2, lambda message: [*foreign, message.data])) as it:
        assert it.ended(it.hand_over()) == "acked"

        assert it.rig.receiver.counts.dropped_frames == 6


def test_a_slow_link_takes_its_time_and_arrives() -> None:
    with passage(progress_timeout_s=0.5) as it:
        it.proxy.bytes_per_s = 1 << 16

        assert it.ended(it.hand_over()) == "acked"


def test_a_link_that_stalls_in_mid_frame_delays_no_other() -> None:
    gate = threading.Event()

    def stall(message: Message) -> Iterator[bytes]:
        half = len(message.data) // 2
        yield message.data[:half]
        assert gate.wait(DEADLINE_S)
        yield message.data[half:]

    with passage(on(FRAME, 1, stall)) as it:
        slow = it.hand_over()
        until(lambda: it.rig.receiver.counts.bytes_received > 0)
        with KvSenderBeside(it.rig) as sender:
            blocks = (60, 61, 62, 63, 40, 41)
            beside = it.rig.open(NUM_TOKENS, blocks)
            sender.hand_over(beside)
            it.rig.events.wait("acked", beside.ticket_id)
        assert read(it.rig.d_pool, blocks, NUM_TOKENS) == it.tokens
        assert slow.ticket_id not in it.rig.events.acks
        gate.set()

        assert it.ended(slow) == "acked"


def _kinds(answer: bytes) -> list[MessageType]:
    """The types of the messages in a receiver's answer."""
    kinds, at = [], 0
    while at < len(answer):
        kind, length = decode_prefix(answer[at : at + PREFIX.size])
        kinds.append(kind)
        at += PREFIX.size + length
    return kinds
