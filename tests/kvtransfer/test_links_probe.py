"""A link is measured: round trip and bandwidth by its own transport, with bytes that reach no pool."""

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

from kvtransfer.all_ranks import RanksSender
from kvtransfer.link_codec import WireError, decode, encode
from kvtransfer.link_messages import Frame, MessageType, Open, Signal
from kvtransfer.probe import MAX_MEASURE_BYTES
from kvtransfer.probe_receiver import PROBE_BYTES, ProbeReceiver
from kvtransfer.receiver_counts import ReceiverCounts
from kvtransfer.sender import KvSender
from tests.kvtransfer.faulty import BOTH, begin_half, faulty_rig, finish, hand_over
from tests.kvtransfer.rank_rig import make_rank_rig
from tests.kvtransfer.rig import DEADLINE_S, RawSender, Rig, fill, make_rig, until
from wire.errors import DeadlineExceeded, Draining, InstanceLost, InvalidRequest, PdserveError
from wire.load import LinkStatus
from wire.types import KvEndpoint

BLOCKS = (1, 2, 3, 4, 5)


@contextmanager
def _live_rig(transport: str, **settings: object) -> Iterator[Rig]:
    """A rig whose sender's clock runs."""
    with make_rig(transport, **settings) as rig:
        sender = KvSender(
            rig.p_pool, instance_id="prefill-1", epoch=56, transports=(transport,), events=rig.events,
            clock=time.monotonic, progress_age=lambda: 0.0, check_interval_s=0.05,
        )  # fmt: skip
        rig.sender.close()
        rig.sender = sender
        yield rig


def _measure(rig: Rig, num_bytes: int = 1 << 20, timeout_s: float = DEADLINE_S) -> LinkStatus:
    return rig.sender.measure("decode-0", 77, rig.receiver.endpoints, num_bytes, timeout_s)


@pytest.mark.parametrize("transport", BOTH)
def test_a_probe_measures_its_own_link_and_touches_no_pool(transport: str) -> None:
    with make_rig(transport) as rig:  # whose clock stands, as that of a starved process does
        fill(rig.d_pool, range(64), 256)
        before = bytes(rig.d_pool.buffer)

        link = _measure(rig)

        assert (link.peer_id, link.transport, link.state) == ("decode-0", transport, "up")
        assert link.round_trip_s > 0
        assert link.bytes_per_s > 0
        assert rig.sender.links() == (link,)
        assert bytes(rig.d_pool.buffer) == before
        assert rig.receiver.counts == ReceiverCounts()
        assert rig.sender.bytes_sent == 0
        assert rig.events.reports == []


@pytest.mark.parametrize("transport", BOTH)
def test_tickets_continue_while_their_link_is_measured(transport: str) -> None:
    with _live_rig(transport) as rig:
        under_way = begin_half(rig)
        answers: queue.SimpleQueue[LinkStatus | PdserveError] = queue.SimpleQueue()
        rig.sender.start_measure("decode-0", 77, rig.receiver.endpoints, 16 << 20, DEADLINE_S, answers.put)

        assert hand_over(rig, 20) == finish(rig, under_way) == transport

        answer = answers.get(timeout=DEADLINE_S)
        assert isinstance(answer, LinkStatus)
        assert answer.bytes_per_s > 0


def test_an_instance_of_several_ranks_measures_a_link() -> None:
    with make_rank_rig("tcp", p_ranks=2, d_ranks=2) as rig:
        assert isinstance(rig.sender, RanksSender)

        link = rig.sender.measure("decode-0", 77, rig.receiver.endpoints, 1000, DEADLINE_S)

        assert (link.transport, link.state) == ("tcp", "up")


def test_a_link_is_measured_again_and_the_last_results_stay() -> None:
    with _live_rig("tcp") as rig:
        first, second = _measure(rig), _measure(rig, 1)

        assert first.epoch == second.epoch
        assert rig.sender.links() == (second,)
        assert (first.round_trip_s, first.bytes_per_s) != (second.round_trip_s, second.bytes_per_s)


def test_measurements_of_a_link_are_made_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, received, resume = ProbeReceiver.handle, threading.Event(), threading.Event()

    def hold(self: ProbeReceiver, signal: Signal) -> None:
        received.set()
        assert resume.wait(DEADLINE_S)
        handle(self, signal)

    monkeypatch.setattr(ProbeReceiver, "handle", hold)
    with _live_rig("tcp") as rig:
        answers: queue.SimpleQueue[tuple[int, LinkStatus | PdserveError]] = queue.SimpleQueue()
        for number in range(3):
            done = partial(lambda number, answer: answers.put((number, answer)), number)
            rig.sender.start_measure("decode-0", 77, rig.receiver.endpoints, 1 << 20, DEADLINE_S, done)
        assert received.wait(DEADLINE_S)
        resume.set()

        for number in range(3):
            which, answer = answers.get(timeout=DEADLINE_S)
            assert which == number
            assert isinstance(answer, LinkStatus)


def test_a_measurement_that_waits_ends_at_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.probe_receiver.ProbeReceiver.handle", lambda self, signal: None)
    with make_rig("tcp") as rig:
        answers: queue.SimpleQueue[LinkStatus | PdserveError] = queue.SimpleQueue()
        for timeout_s in (20.0, 5.0):
            rig.sender.start_measure("decode-0", 77, rig.receiver.endpoints, 1000, timeout_s, answers.put)
        until(lambda: bool(rig.sender.links()) and rig.sender.links()[0].state == "up")

        for seconds, words in ((5.1, "still being measured for others"), (15.0, "0 of 5 round trips and 0 of 1000")):
            rig.clock.now += seconds
            assert words in str(answers.get(timeout=DEADLINE_S))


def test_a_lost_link_ends_all_its_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    received = threading.Event()
    monkeypatch.setattr("kvtransfer.probe_receiver.ProbeReceiver.handle", lambda self, signal: received.set())
    with faulty_rig(monkeypatch, ("tcp",)) as (rig, made):
        answers: queue.SimpleQueue[LinkStatus | PdserveError] = queue.SimpleQueue()
        for _ in range(2):
            rig.sender.start_measure("decode-0", 77, rig.receiver.endpoints, 1000, 5.0, answers.put)
        assert received.wait(DEADLINE_S)

        made["tcp"].cut()

        assert all(isinstance(answers.get(timeout=DEADLINE_S), InstanceLost) for _ in range(2))


def test_an_unanswered_probe_ends_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtransfer.probe_receiver.ProbeReceiver.handle", lambda self, signal: None)
    with make_rig("tcp") as rig:
        answers: queue.SimpleQueue[LinkStatus | PdserveError] = queue.SimpleQueue()
        rig.sender.start_measure("decode-0", 77, rig.receiver.endpoints, 1000, 5.0, answers.put)
        until(lambda: bool(rig.sender.links()) and rig.sender.links()[0].state == "up")

        rig.clock.now += 5.1
        answer = answers.get(timeout=DEADLINE_S)

        assert isinstance(answer, DeadlineExceeded)
        assert "0 of 5 round trips and 0 of 1000 bytes" in str(answer)
        assert hand_over(rig) == "tcp"
        assert rig.sender.links()[0].failures == 0


def test_a_probe_has_four_frames_in_flight_and_tickets_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, moved = ProbeReceiver._answer, []

    def keep_back(self: ProbeReceiver, kind: MessageType, number: int) -> None:
        if kind is MessageType.PROBED:
            moved.append(number)
        else:
            answer(self, kind, number)

    monkeypatch.setattr("kvtransfer.probe_receiver.ProbeReceiver._answer", keep_back)
    with make_rig("tcp") as rig:
        answers: queue.SimpleQueue[LinkStatus | PdserveError] = queue.SimpleQueue()
        rig.sender.start_measure("decode-0", 77, rig.receiver.endpoints, 1 << 20, 5.0, answers.put)
        until(lambda: len(moved) == 4)
        assert [hand_over(rig) for _ in range(3)] == ["tcp"] * 3
        assert len(moved) == 4

        rig.clock.now += 5.1
        error = answers.get(timeout=DEADLINE_S)
        tensor_bytes = 256 * rig.p_pool.layout.tensors[0].token_bytes
        assert f"5 round trips and {4 * tensor_bytes} of {1 << 20} bytes" in str(error)
        assert hand_over(rig) == "tcp"


def test_a_peer_that_never_answers_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.sender._JOIN_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent_server, _live_rig("tcp") as rig:
        endpoint = KvEndpoint("tcp", f"127.0.0.1:{silent_server.getsockname()[1]}")

        with pytest.raises(DeadlineExceeded, match=r"could not be measured within 0\.2 s"):
            rig.sender.measure("deaf", 1, (endpoint,), 1000, 0.2)


def test_a_link_lost_during_a_measurement_ends_it_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_rig(monkeypatch, ("tcp",)) as (rig, made):
        monkeypatch.setattr("kvtransfer.probe_receiver.ProbeReceiver.handle", lambda self, signal: made["tcp"].cut())

        with pytest.raises(InstanceLost, match="is lost"):
            _measure(rig)


def test_a_missing_instance_is_named() -> None:
    with _live_rig("tcp") as rig, pytest.raises(InstanceLost, match="no KV link to nobody"):
        rig.sender.measure("nobody", 1, (KvEndpoint("tcp", "127.0.0.1:1"),), 1000, DEADLINE_S)


@pytest.mark.parametrize("num_bytes", [0, -1, MAX_MEASURE_BYTES + 1])
def test_too_many_bytes_are_refused_with_the_limit(num_bytes: int) -> None:
    with (
        _live_rig("tcp") as rig,
        pytest.raises(InvalidRequest, match=f"num_bytes is {num_bytes}, but must be 1 to {MAX_MEASURE_BYTES}"),
    ):
        _measure(rig, num_bytes)


def test_a_closed_sender_measures_nothing_and_ends_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.probe_receiver.ProbeReceiver.handle", lambda self, signal: None)
    with make_rig("tcp") as rig:
        answers: queue.SimpleQueue[LinkStatus | PdserveError] = queue.SimpleQueue()
        rig.sender.start_measure("decode-0", 77, rig.receiver.endpoints, 1000, 5.0, answers.put)

        rig.sender.close()

        assert isinstance(answers.get(timeout=DEADLINE_S), InstanceLost)
        with pytest.raises(Draining):
            _measure(rig)


def test_a_link_that_drains_finishes_its_measurement() -> None:
    with _live_rig("tcp") as rig:
        answers: queue.SimpleQueue[LinkStatus | PdserveError] = queue.SimpleQueue()
        rig.sender.start_measure("decode-0", 77, rig.receiver.endpoints, 4 << 20, DEADLINE_S, answers.put)
        for peer in rig.sender._peers.values():
            peer.retire()

        assert isinstance(answers.get(timeout=DEADLINE_S), LinkStatus)
        until(lambda: rig.sender.links() == ())


@pytest.mark.parametrize("transport", BOTH)
def test_a_probe_by_hand_is_answered(transport: str) -> None:
    with make_rig(transport) as rig:
        tokens = fill(rig.p_pool, range(5), 20)
        ticket, raw = rig.open(20, BLOCKS), RawSender(rig)
        before = bytes(rig.d_pool.buffer)

        raw.stream.send([encode(Signal(MessageType.PING, 7))])
        raw.stream.send([encode(Signal(MessageType.PROBE, 2**64 - 1))])
        raw.announce(*raw.frame(ticket, 0, 0, tokens))

        received = [decode(*raw.stream.receive_message(first_byte_s=DEADLINE_S)) for _ in range(2)]
        assert received == [Signal(MessageType.PONG, 7), Signal(MessageType.PROBED, 2**64 - 1)]
        assert bytes(rig.d_pool.buffer) == before
        raw.stream.close()


@pytest.mark.parametrize("transport", BOTH)
@pytest.mark.parametrize(
    "what",
    [
        "another message",
        "another probe",
        "too big",
        "blocks that are not there",
        "from a receiver",
        "many tensors",
        "no tokens",
    ],
)
def test_a_probe_that_breaks_the_rules_cuts_its_link_and_is_counted(transport: str, what: str) -> None:
    with make_rig(transport, num_blocks=64) as rig:
        tokens = fill(rig.p_pool, range(5), 20)
        ticket, raw = rig.open(20, BLOCKS), RawSender(rig)
        frame, payload = raw.frame(ticket, 0, 0, tokens)
        before = bytes(rig.d_pool.buffer)
        raw.stream.send([encode(Signal(MessageType.PROBED if what == "from a receiver" else MessageType.PROBE, 1))])
        if what == "another message":
            raw.say(Open(ticket.ticket_id, ticket.epoch, 20, 0))
        elif what == "another probe":
            raw.stream.send([encode(Signal(MessageType.PING, 2))])
        elif what == "too big":
            raw.announce(replace(frame, num_bytes=PROBE_BYTES + 1), payload)
        elif what == "many tensors":
            raw.announce(replace(frame, num_tensors=2), payload)
        elif what == "no tokens":
            raw.announce(replace(frame, end=0), payload)
        elif what == "blocks that are not there":
            raw.announce(_impossible(frame, transport), payload)

        until(lambda: rig.receiver.counts.refused_connections == 1)

        assert bytes(rig.d_pool.buffer) == before
        assert hand_over(rig) == transport
        raw.stream.close()


def _impossible(frame: Frame, transport: str) -> Frame:
    """Over TCP blocks are not named: there a payload that is larger than any probe's is what cannot be."""
    return replace(frame, block_ids=(0, 1, 2, 3, 64)) if transport == "shm" else replace(frame, num_bytes=2**63)


@pytest.mark.parametrize("kind", [MessageType.PING, MessageType.PONG, MessageType.PROBE, MessageType.PROBED])
def test_signals_survive_the_wire_and_another_length_does_not(kind: MessageType) -> None:
    signal = Signal(kind, 2**64 - 1)

    assert decode(kind, encode(signal)[12:]) == signal
    for body in (b"", bytes(7), bytes(9)):
        with pytest.raises(WireError):
            decode(kind, body)
