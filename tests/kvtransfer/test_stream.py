"""Sending and receiving in pieces, with deadlines."""

import itertools
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtransfer.link_codec import WireError, decode, encode
from kvtransfer.link_messages import Ack, MessageType
from kvtransfer.stream import LinkLost, Stream, expect


@pytest.fixture
def streams() -> Iterator[tuple[Stream, Stream]]:
    yield from _pair(0.3)


@pytest.fixture
def patient() -> Iterator[tuple[Stream, Stream]]:
    yield from _pair(20.0)


def _pair(progress_timeout_s: float) -> Iterator[tuple[Stream, Stream]]:
    one, other = (Stream(sock, progress_timeout_s=progress_timeout_s) for sock in socket.socketpair())
    pair = one, other
    yield pair
    for stream in pair:
        stream.close()


def test_many_pieces_arrive_in_differently_cut_pieces(patient: tuple[Stream, Stream]) -> None:
    data = bytes(range(256)) * 8_192
    pieces = [memoryview(data)[at : at + 700] for at in range(0, len(data), 700)]
    target = bytearray(len(data))
    sending = threading.Thread(target=patient[0].send, args=(pieces,))
    sending.start()

    cuts = [memoryview(target)[at : at + 1_000] for at in range(0, len(data), 1_000)]
    received = patient[1].receive_pieces(cuts, stopped=lambda: False)
    sending.join(300)

    assert received == len(data)
    assert bytes(target) == data


def test_a_peer_that_reads_nothing_is_lost(streams: tuple[Stream, Stream]) -> None:
    with pytest.raises(LinkLost, match=r"accepted no data for 0\.3 s"):
        streams[0].send([bytes(64 << 20)])


def test_a_peer_that_sends_half_a_message_is_lost(streams: tuple[Stream, Stream]) -> None:
    streams[0].send([encode(Ack("00" * 16, 1))[:20]])

    with pytest.raises(LinkLost, match="in the middle of a message"):
        streams[1].receive_message()


def test_a_starved_process_does_not_blame_its_peer(
    streams: tuple[Stream, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    message, looks, much_later = encode(Ack("00" * 16, 1)), itertools.count(), threading.Event()

    def starved() -> float:
        if next(looks) == 10:  # a second by the wall: the limit is 0.3 s
            much_later.set()
        return 0.0

    monkeypatch.setattr("kvtransfer.stream.run_time", starved)
    streams[0].send([message[:20]])
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(streams[1].receive_message)
        assert much_later.wait(300)
        streams[0].send([message[20:]])

        assert received.result(300)[0] is MessageType.ACK


def test_a_peer_that_closes_is_lost(streams: tuple[Stream, Stream]) -> None:
    streams[0].close()

    with pytest.raises(LinkLost, match="closed the connection"):
        streams[1].receive_message()


def test_answering_a_peer_that_does_not_read_cuts_it_at_once(streams: tuple[Stream, Stream]) -> None:
    for _ in range(4):
        streams[0].send_now(bytes(1 << 20))

    with pytest.raises(LinkLost):
        streams[0].receive_message()


def test_a_message_out_of_turn_is_a_protocol_error(streams: tuple[Stream, Stream]) -> None:
    streams[0].send([encode(Ack("00" * 16, 1))])

    with pytest.raises(WireError, match="received ACK, expected HELLO"):
        expect(streams[1], MessageType.HELLO, timeout_s=1)


def test_drained_bytes_are_gone_and_the_next_message_is_complete(streams: tuple[Stream, Stream]) -> None:
    streams[0].send([bytes(100_000), encode(Ack("11" * 16, 2))])

    streams[1].drain(100_000)

    assert decode(*streams[1].receive_message()) == Ack("11" * 16, 2)
