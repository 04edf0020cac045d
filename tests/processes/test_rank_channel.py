"""A channel on which one thread receives without a deadline while another sends: each call has its own deadline."""

import itertools
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum

import pytest

from processes.rank_channel import Channel, ChannelClosed

DEADLINE_S = 300.0
_MANY_BYTES = 8 << 20


class Kind(IntEnum):
    HELLO = 1


class Ends:
    """Two ends of a channel; `socket` is the one that `ours` owns."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.ours, self.theirs = Channel(self.socket, Kind), Channel(theirs, Kind)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    with made.ours, made.theirs:
        yield made


def test_a_receiver_without_deadline_survives_other_threads_sends(ends: Ends) -> None:
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(ends.ours.receive, None)
        ends.ours.send(Kind.HELLO, timeout_s=0.01)
        assert ends.theirs.receive(DEADLINE_S).kind == Kind.HELLO

        assert ends.socket.gettimeout() is None  # a timeout set on the socket would apply to both
        ends.theirs.send(Kind.HELLO, b"late", timeout_s=DEADLINE_S)

        assert received.result(DEADLINE_S).payload == b"late"


def test_a_blocked_send_ends_at_its_deadline(ends: Ends) -> None:
    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(ends.ours.send, Kind.HELLO, bytes(_MANY_BYTES), timeout_s=0.2)
        received = pool.submit(ends.ours.receive, None)  # begins after the send, and waits as long as it takes

        with pytest.raises(TimeoutError, match=r"a message was not accepted within 0\.2 s"):
            sent.result(DEADLINE_S)
        ends.theirs.send(Kind.HELLO, timeout_s=DEADLINE_S)
        assert received.result(DEADLINE_S).kind == Kind.HELLO


def test_a_starved_reader_does_not_lose_its_peer(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, late = itertools.count(), threading.Event()

    def starved() -> float:
        if next(looks) == 10:  # by the wall the limit has passed, and the process did not run
            late.set()
        return 0.0

    monkeypatch.setattr("processes.rank_channel.run_time", starved)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(ends.ours.receive, 0.01)
        assert late.wait(DEADLINE_S)
        ends.theirs.send(Kind.HELLO, timeout_s=DEADLINE_S)

        assert received.result(DEADLINE_S).kind == Kind.HELLO


def test_a_deadline_holds_for_a_message_that_is_incomplete(ends: Ends) -> None:
    half, rest = socket.socketpair()
    with half, Channel(rest, Kind) as channel:
        half.sendall(b"\x01\x00\x00\x00")

        with pytest.raises(TimeoutError, match=r"no message arrived within 0\.01 s"):
            channel.receive(0.01)


def test_using_a_closed_channel_raises(ends: Ends) -> None:
    ends.ours.close()

    with pytest.raises(ChannelClosed):
        ends.ours.send(Kind.HELLO, timeout_s=DEADLINE_S)
    with pytest.raises(ChannelClosed):
        ends.ours.receive(DEADLINE_S)
    with pytest.raises(ChannelClosed):
        ends.ours.has_more(0.0)


def test_a_shutdown_wakes_a_blocked_receive(ends: Ends) -> None:
    begun = threading.Event()

    def receive() -> None:
        begun.set()
        ends.ours.receive(None)

    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive)
        assert begun.wait(DEADLINE_S)
        ends.socket.shutdown(socket.SHUT_RDWR)

        with pytest.raises(ChannelClosed):
            received.result(DEADLINE_S)
