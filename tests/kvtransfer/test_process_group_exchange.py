"""The messages of a set-up and the store over them: bounded, with deadlines, and of one group only."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from kvtransfer.link_codec import WireError, encode, pack
from kvtransfer.link_messages import MessageType, Refuse
from kvtransfer.process_group.exchange import SetupExchange, SetupKind
from kvtransfer.process_group.store import LinkStore
from kvtransfer.ring import Ring
from kvtransfer.stream import LinkLost, Stream
from native.ticker import run_time
from tests.kvtransfer.groups import stream_pair
from tests.kvtransfer.rig import DEADLINE_S
from wire.errors import Unavailable

Both = tuple[Stream, Stream]


@pytest.fixture
def streams() -> Iterator[Both]:
    pair = stream_pair(DEADLINE_S)
    yield pair
    for stream in pair:
        stream.close()


def _exchanges(streams: Both) -> tuple[SetupExchange, SetupExchange]:
    made = SetupExchange(streams[0], "group"), SetupExchange(streams[1], "group")
    for exchange in made:
        exchange.deadline = run_time() + DEADLINE_S
    return made


def test_a_key_set_on_one_side_is_read_on_the_other(streams: Both) -> None:
    exchange, other = _exchanges(streams)
    two = LinkStore(other)
    with ThreadPoolExecutor(1) as setter:
        setter.submit(lambda: LinkStore(exchange).set("0/0", b"an address"))
        assert two.get("0/0") == b"an address"

    assert exchange.get("0/0") == b"an address"
    assert two.check(["0/0"])
    assert not two.check(["0/0", "0/1"])


def test_torchs_own_threads_neither_read_nor_write_the_link(streams: Both) -> None:
    """NCCL's and HCCL's watchdogs check, get and set keys of a group's store as long as the group exists."""
    one, two = _exchanges(streams)
    store = LinkStore(one)
    two.set("set before", b"1")
    two.send(SetupKind.DONE)
    with ThreadPoolExecutor(1) as watchdog:
        assert not watchdog.submit(store.check, ["exception_dump"]).result(DEADLINE_S)
        with pytest.raises(LinkLost, match="torch's own threads"):
            watchdog.submit(store.get, "set before").result(DEADLINE_S)
        watchdog.submit(store.set, "exception_dump", b"0").result(DEADLINE_S)
        assert watchdog.submit(store.get, "exception_dump").result(DEADLINE_S) == b"0"

    one.finish(DEADLINE_S)
    two.receive([SetupKind.DONE], DEADLINE_S)

    assert (store.get("set before"), two.num_keys) == (b"1", 1)


def test_a_missing_key_costs_the_deadline_not_torchs_wait(streams: Both) -> None:
    _, exchange = _exchanges(streams)
    exchange.deadline = run_time() + 0.05

    with pytest.raises(LinkLost):
        LinkStore(exchange).wait(["0/0"], timedelta(hours=1))


def test_a_key_that_comes_byte_by_byte_is_cut_at_the_deadline(streams: Both) -> None:
    _, exchange = _exchanges(streams)
    exchange.deadline = run_time() + 0.1
    message, cut, sent = pack(MessageType.SETUP, b"\x05\x00\x07group/k" + bytes(500)), threading.Event(), 0

    def drip() -> None:
        nonlocal sent
        while sent < len(message) and not cut.wait(0.01):
            streams[0].send([message[sent : sent + 1]])
            sent += 1

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises(LinkLost):
            exchange.get("k")
    finally:
        cut.set()
        dripping.join(DEADLINE_S)

    assert sent < len(message)


def test_both_ends_finish_although_keys_were_left_unread(streams: Both) -> None:
    one, two = _exchanges(streams)
    one.set("left", b"over")

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(end.finish, DEADLINE_S) for end in (one, two)]:
            done.result(DEADLINE_S)
    two.set("late", b"kept here")

    assert two.get("left") == b"over"
    assert two.get("late") == b"kept here"
    with pytest.raises(LinkLost, match="is closed"):
        one.get("late")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "malformed SETUP"),
        (b"\x05\x00\xff", "a key has 255 bytes, of which 0 are present"),
        (b"\x63\x00\x00", "malformed SETUP"),
        (b"\x05\x00\x07other/k", "does not belong to the group"),
        (b"\x05\x00\x07group/k" + bytes(7_000), "7000 bytes, but the limits are"),
        (b"\x02\x00\x00", "received TURN, expected"),
    ],
)
def test_an_oversized_or_misplaced_message_is_refused(streams: Both, body: bytes, words: str) -> None:
    _, exchange = _exchanges(streams)
    streams[0].send([pack(MessageType.SETUP, body)])

    with pytest.raises(WireError, match=words):
        exchange.get("k")


def test_the_number_of_keys_is_bounded_on_both_sides(streams: Both) -> None:
    one, two = _exchanges(streams)
    for number in range(64):
        one.set(f"{number:02}", b"")
    with pytest.raises(WireError, match="more than 64 keys"):
        one.set("64", b"")

    streams[0].send([pack(MessageType.SETUP, b"\x05\x00\x08group/64")])
    with pytest.raises(WireError, match="more than 64 keys"):
        two.wait(["no such key"], DEADLINE_S)


def test_the_peers_refusal_is_raised(streams: Both) -> None:
    _, exchange = _exchanges(streams)
    streams[0].send([encode(Refuse("Unavailable", "10 bytes are free, 20 are needed"))])

    with pytest.raises(Unavailable, match="10 bytes are free, 20 are needed"):
        exchange.receive([SetupKind.GRANTED], DEADLINE_S)


def test_a_ring_never_gives_bytes_twice_and_finds_room_again() -> None:
    ring = Ring(100)
    taken: list[range] = []
    for step in range(1_000):
        num_bytes = 1 + step * 37 % 40
        while (start := ring.take(num_bytes)) is None:
            ring.give_back()
            taken.pop(0)
        span = range(start, start + num_bytes)
        assert span.stop <= 100
        assert all(span.stop <= other.start or other.stop <= span.start for other in taken)
        taken.append(span)

    assert ring.take(101) is None
