"""Ranks that move their own KV, driven over a Unix socket: as within one process."""

import select
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.block_tables import TablesReceived
from kvtransfer.far_rank import FarRank
from kvtransfer.interface import SendStats
from kvtransfer.quorum import Quorum
from kvtransfer.rank_messages import (
    RankCounters,
    RankMessage,
    pack_bytes,
    pack_numbers,
    unpack_bytes,
    unpack_numbers,
)
from kvtransfer.rank_settings import RankTransferSettings
from kvtransfer.rank_transfer import RankTransfer
from kvtransfer.receiver_counts import ReceiverCounts
from processes.failpoints import Failpoints
from processes.rank_channel import Channel, ChannelClosed, Message
from processes.rank_payloads import from_json, pack_error, to_json, unpack_error
from security.trust import LiveAddresses, Trust
from tests.kvtransfer.every_transport import EVERY_TRANSPORT
from tests.kvtransfer.rank_rig import RankRig, make_rank_rig, random_kv, tensors
from tests.kvtransfer.rig import DEADLINE_S, Pool, Recorder, until
from tests.kvtransfer.test_device_marks import MarkedPool
from wire.errors import ConfigError, HandoffFailed, InstanceLost, NoCapacity, Unavailable
from wire.kv_layout import PoolLayout, Rank
from wire.load import LinkStatus
from wire.types import KvEndpoint, Ticket

NUM_TOKENS, BLOCK_IDS = 150, {16: (9, 3, 4, 5, 30, 1, 7, 12, 13, 20), 128: (2, 0)}
SETTINGS = RankTransferSettings(
    "decode-0", 77, "127.0.0.1", None, ("tcp",), 10.0, (20000, 20100), True, 2, 10.0, "ab" * 32, ("10.0.0.1",)
)  # fmt: skip
ENDPOINT = KvEndpoint("tcp", "127.0.0.1:1", "", 1)
TICKET = Ticket("ab" * 16, 77, "decode-0", 150, 16, 10.0, (ENDPOINT,))


@pytest.fixture
def rig() -> Iterator[RankRig]:
    with make_rank_rig("tcp", p_ranks=2, d_ranks=2, heads=3, d_block=128, far=True) as made:
        yield made
        assert not made.lost


@pytest.fixture(
    params=[pytest.param(*one.values, marks=[*one.marks, *((pytest.mark.long,) if one.values != ("tcp",) else ())])
            for one in EVERY_TRANSPORT]
)  # fmt: skip
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("p_ranks", "d_ranks", "heads"), [(2, 2, 3), (2, 1, 3), (1, 2, 4), (4, 2, 1), (2, 4, 3)])
def test_every_head_of_every_token_lands_in_its_slot(transport: str, p_ranks: int, d_ranks: int, heads: int) -> None:
    with make_rank_rig(transport, p_ranks=p_ranks, d_ranks=d_ranks, heads=heads, d_block=128, far=True) as rig:
        kv = random_kv(rig.tensors, NUM_TOKENS, seed=heads)
        rig.fill(kv, BLOCK_IDS[16])
        ticket = rig.open(NUM_TOKENS, BLOCK_IDS[128])

        rig.hand_over(ticket, BLOCK_IDS[16], description=b"the prompt")
        rig.events.wait("acked", ticket.ticket_id)

        rig.check(kv, BLOCK_IDS[128])
        num_bytes = NUM_TOKENS * sum(pool.layout.token_bytes for pool in rig.d_pools)
        assert rig.events.commits[ticket.ticket_id] == (b"the prompt", BLOCK_IDS[128], num_bytes)
        assert rig.events.acks[ticket.ticket_id].kv_bytes == num_bytes
        assert rig.events.acks[ticket.ticket_id].transport == transport
        assert [kind for kind, _ in rig.events.reports] == ["committed", "acked"]
        until(lambda: rig.receiver.bytes_received == rig.sender.bytes_sent == num_bytes)
        until(lambda: {status.state for status in rig.sender.links()} == {"up"})
        assert [endpoint.rank for endpoint in ticket.endpoints] == [*range(d_ranks)]
        assert not rig.lost


def test_a_refusal_of_the_owner_ends_the_ticket_on_every_rank(rig: RankRig) -> None:
    rig.events.refusal = NoCapacity("the decode instance is full")
    ticket = rig.open(NUM_TOKENS, BLOCK_IDS[128])

    rig.hand_over(ticket, BLOCK_IDS[16])
    rig.events.wait("failed", ticket.ticket_id)
    rig.events.wait("ended", ticket.ticket_id)

    assert "the decode instance is full" in str(rig.events.failures[ticket.ticket_id])
    assert rig.events.ends[ticket.ticket_id][0] == BLOCK_IDS[128]


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_ticket_that_either_side_aborts_ends_on_all_ranks_of_both(rig: RankRig, side: str) -> None:
    ticket = rig.open(NUM_TOKENS, BLOCK_IDS[128])
    rig.sender.begin(ticket)
    rig.put_all(ticket, BLOCK_IDS[16], layers=2)
    until(lambda: all(transfer._receiver.bytes_received > 0 for transfer in rig.transfers if transfer._reports._others))

    (rig.sender if side == "sender" else rig.receiver).abort(ticket.ticket_id, "no longer needed")
    rig.events.wait("ended", ticket.ticket_id)
    if side == "receiver":
        rig.events.wait("failed", ticket.ticket_id)

    assert "no longer needed" in rig.events.ends[ticket.ticket_id][1]
    assert rig.events.count("ended") == 1
    until(lambda: not any(transfer._reports._others for transfer in rig.transfers))  # settled on every rank


def test_a_rank_knows_a_ticket_before_any_sender_does(rig: RankRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's message is in the rank's socket: the thread of a link that looks up the ticket reads it."""
    (transfer,) = [transfer for transfer in rig.transfers if transfer._receiver.endpoints == rig.receiver.endpoints[1:]]
    resumed, requested = threading.Event(), threading.Event()
    take, catch_up = transfer._take, transfer._reports.catch_up

    def slow(message: object) -> None:
        if threading.current_thread().name == "kv-rank-read":
            resumed.wait(DEADLINE_S)  # holds the socket's lock, and has read rank 0's message
        take(message)  # type: ignore[arg-type]

    def ask() -> None:
        requested.set()
        catch_up()

    monkeypatch.setattr(transfer, "_take", slow)
    monkeypatch.setattr(transfer._reports, "catch_up", ask)
    kv = random_kv(rig.tensors, NUM_TOKENS)
    rig.fill(kv, BLOCK_IDS[16])
    ticket = rig.open(NUM_TOKENS, BLOCK_IDS[128])

    rig.hand_over(ticket, BLOCK_IDS[16])
    assert requested.wait(DEADLINE_S)
    resumed.set()
    rig.events.wait("acked", ticket.ticket_id)

    rig.check(kv, BLOCK_IDS[128])


def test_finished_senders_wait_for_slower_ranks(rig: RankRig) -> None:
    (transfer,) = [transfer for transfer in rig.transfers if transfer._receiver.endpoints == rig.receiver.endpoints[1:]]
    ticket = rig.open(NUM_TOKENS, BLOCK_IDS[128])
    rig.sender.begin(ticket)
    rig.put_all(ticket, BLOCK_IDS[16], layers=2)
    first, share = rig.receivers[0]._table, transfer._receiver._table
    until(lambda: min(one.progress(ticket.ticket_id) for one in (first, share)) > 0)

    def both() -> int:
        return first.progress(ticket.ticket_id) + share.progress(ticket.ticket_id)

    until(
        lambda: (
            transfer._reports.progress(ticket.ticket_id)
            == both()
            == rig.receivers[0]._quorum.progress(ticket.ticket_id)
        )
    )


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_killed_ranks_process_ends_its_tickets_and_is_lost(side: str) -> None:
    ranks = {"sender": {"p_ranks": 2, "d_ranks": 1}, "receiver": {"p_ranks": 1, "d_ranks": 2}}[side]
    with make_rank_rig("tcp", **ranks, heads=4, d_block=128, far=True, processes=True) as rig:
        ticket = rig.open(NUM_TOKENS, BLOCK_IDS[128])
        rig.sender.begin(ticket)
        rig.put_all(ticket, BLOCK_IDS[16], layers=2)
        ((far,), (process,)) = rig.far, rig.processes
        until(lambda: (far.counters.bytes_sent or far.counters.received.bytes_received) > 0)

        process.kill()

        if side == "sender":
            rig.events.wait("ended", ticket.ticket_id)
            assert rig.events.ends[ticket.ticket_id][0] == BLOCK_IDS[128]
        else:
            rig.events.wait("failed", ticket.ticket_id)
        until(lambda: bool(rig.lost))
        assert rig.lost == ["rank 1 of 2 stopped transferring its KV: the other process closed the connection"]


def test_a_put_waits_until_the_rank_has_launched_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's host may be a step ahead of the rank's: the newest mark there may be of an earlier layer."""
    with make_rank_rig("tcp", p_ranks=2, d_ranks=1, far=True) as rig:
        (transfer,), (far,) = rig.transfers, rig.far
        pool, waiting, put = MarkedPool(rig.p_pools[1].layout), threading.Event(), threading.Event()
        wait_for, marks = pool.await_marks, list[object]()

        def await_marks(count: int, timeout_s: float) -> bool:
            waiting.set()
            return wait_for(count, timeout_s)

        def note(*args: object) -> None:
            marks.append(pool.mark())
            put.set()

        monkeypatch.setattr(pool, "await_marks", await_marks)
        monkeypatch.setattr(transfer, "_memory", pool)
        monkeypatch.setattr(transfer._sender, "put", note)
        monkeypatch.setattr(far, "num_marks", lambda: 2)
        ticket = rig.open(50, range(4))
        rig.sender.begin(ticket)
        pool.written()
        rig.put_all(ticket, range(4), layers=1)

        assert waiting.wait(DEADLINE_S)
        assert not put.is_set()
        pool.written()
        assert put.wait(DEADLINE_S)
        assert marks == [pool.ahead.marks[1]]


def test_a_put_whose_layer_the_rank_never_launches_ends_its_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that layer the receiver would wait for the rest as long as the sender lives."""
    with make_rank_rig("tcp", p_ranks=2, d_ranks=1, far=True) as rig:
        (transfer,), (far,) = rig.transfers, rig.far
        pool = MarkedPool(rig.p_pools[1].layout)
        monkeypatch.setattr(pool, "await_marks", lambda count, timeout_s: False)
        monkeypatch.setattr(transfer, "_memory", pool)
        monkeypatch.setattr(far, "num_marks", lambda: 2)
        ticket = rig.open(50, range(4))
        rig.sender.begin(ticket)
        rig.put_all(ticket, range(4), layers=1)

        rig.events.wait("failed", ticket.ticket_id)
        assert "was not launched by another rank within" in str(rig.events.failures[ticket.ticket_id])


def test_a_rank_requests_a_ticket_announced_late(rig: RankRig, monkeypatch: pytest.MonkeyPatch) -> None:
    (number,) = [
        at for at, transfer in enumerate(rig.transfers) if transfer._receiver.endpoints == rig.receiver.endpoints[1:]
    ]
    transfer, channel = rig.transfers[number], rig.far[number]._channel
    requested = threading.Event()
    send, catch_up = channel.send, transfer._reports.catch_up

    def slow(kind: RankMessage, payload: bytes = b"", *, timeout_s: float) -> None:
        if kind == RankMessage.RESERVE:
            requested.wait(DEADLINE_S)
        send(kind, payload, timeout_s=timeout_s)

    def ask() -> None:
        requested.set()
        catch_up()

    monkeypatch.setattr(channel, "send", slow)
    monkeypatch.setattr(transfer._reports, "catch_up", ask)
    kv = random_kv(rig.tensors, NUM_TOKENS)
    rig.fill(kv, BLOCK_IDS[16])
    ticket = rig.open(NUM_TOKENS, BLOCK_IDS[128])

    rig.hand_over(ticket, BLOCK_IDS[16])
    rig.events.wait("acked", ticket.ticket_id)

    assert requested.is_set()
    rig.check(kv, BLOCK_IDS[128])


@pytest.mark.parametrize("error", [ValueError("17 blocks"), RuntimeError("no memory")])
def test_a_failed_share_ends_the_ticket_and_frees_its_blocks(
    error: Exception, rig: RankRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (transfer,) = [transfer for transfer in rig.transfers if transfer._receiver.endpoints == rig.receiver.endpoints[1:]]

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(transfer._receiver._table, "reserve", refuse)
    ticket = rig.open(NUM_TOKENS, BLOCK_IDS[128])

    rig.events.wait("ended", ticket.ticket_id)

    blocks, reason = rig.events.ends[ticket.ticket_id]
    assert (blocks, str(error) in reason) == (BLOCK_IDS[128], True)


def test_finished_tickets_block_tables_are_forgotten_on_both_ends(rig: RankRig) -> None:
    for ending in ("acked", "failed"):
        ticket = rig.open(NUM_TOKENS, BLOCK_IDS[128])
        rig.sender.begin(ticket)
        rig.put_all(ticket, BLOCK_IDS[16])
        if ending == "acked":
            rig.sender.commit(ticket.ticket_id, b"p")
        else:
            rig.receiver.abort(ticket.ticket_id, "no longer needed")
        rig.events.wait(ending, ticket.ticket_id)

    senders = [far._sender for far in rig.far if far._sender is not None]
    until(lambda: not any(transfer._tables._tables for transfer in rig.transfers))
    until(lambda: not any(sender._tables._known for sender in senders))
    assert senders


def test_a_rank_without_links_fails_the_start_with_its_reason() -> None:
    ours, theirs = socket.socketpair()
    pool = Pool(PoolLayout(tensors(3), num_blocks=4, block_size=16, rank=Rank(1, 2)))
    settings = replace(SETTINGS, transports=("pigeon",), port_range=None)

    with pytest.raises(ConfigError):
        RankTransfer(pool, settings, theirs, lambda: 0.0)
    far = FarRank(ours, Rank(1, 2), InstanceLost, Trust())
    with pytest.raises(ConfigError, match="--kv-transport 'pigeon' is not one of "):
        far.start(DEADLINE_S)

    far.close()
    theirs.close()
    pool.close()


class ConnectedRank:
    """A FarRank connected to `there`, the rank's end, which the test controls, and the reason for a loss."""

    def __init__(self, trust: Trust | None = None) -> None:
        ours, self.socket = socket.socketpair()
        self.messages: list[str] = []
        self.is_lost = threading.Event()
        self.far, self.there = (
            FarRank(ours, Rank(1, 2), self._lose, trust or Trust()),
            Channel(self.socket, RankMessage),
        )
        self.there.send(RankMessage.HERE, to_json([ENDPOINT]), timeout_s=DEADLINE_S)
        self.far.start(DEADLINE_S)

    def _lose(self, what: str) -> InstanceLost:
        self.messages.append(what)
        self.is_lost.set()
        return InstanceLost(what)

    def received(self) -> tuple[RankMessage, bytes]:
        message = self.there.receive(DEADLINE_S)
        return message.kind, message.payload


@pytest.fixture
def peer() -> Iterator[ConnectedRank]:
    made = ConnectedRank()
    yield made
    made.far.close()
    made.there.close()


def test_a_rank_without_messages_for_long_is_not_lost(monkeypatch: pytest.MonkeyPatch, peer: ConnectedRank) -> None:
    monkeypatch.setattr(peer.far._outbox, "_send_s", 0.01)
    peer.far.send(RankMessage.ABORT, pack_bytes("t", b"why"))

    assert peer.received()[0] == RankMessage.ABORT
    assert not peer.is_lost.wait(0.2)  # twenty times as long as a message may take
    assert peer.far._socket.gettimeout() is None
    peer.there.send(RankMessage.COUNTERS, to_json(RankCounters(bytes_sent=5)), timeout_s=DEADLINE_S)
    until(lambda: peer.far.counters.bytes_sent == 5)


def test_a_rank_that_reads_nothing_is_lost_without_blocking_rank_0(
    monkeypatch: pytest.MonkeyPatch, peer: ConnectedRank
) -> None:
    monkeypatch.setattr(peer.far._outbox, "_send_s", 0.05)

    for _ in range(64):
        peer.far.send(RankMessage.ABORT, pack_bytes("t", bytes(1 << 20)))

    assert peer.is_lost.wait(DEADLINE_S)
    assert peer.messages == ["rank 1 of 2 does not accept messages: a message was not accepted within 0.05 s"]


class SettledMeanwhile(dict[str, Any]):
    """The tickets of a share, one of which is settled just after it was found."""

    settle: Callable[[str], None]

    def __contains__(self, ticket_id: object) -> bool:
        return self.get(str(ticket_id)) is not None

    def get(self, ticket_id: str, default: object = None) -> Any:
        found, settle = super().get(ticket_id, default), self.settle
        self.settle = lambda ticket_id: None
        settle(ticket_id)
        return found


def test_a_message_about_a_settled_ticket_leaves_nothing_behind(peer: ConnectedRank) -> None:
    quorum = Quorum(Recorder(), Failpoints.parse(""))
    peer.far.receiver(quorum)
    share = peer.far._share
    share._progress = known = SettledMeanwhile()
    known.settle = lambda ticket_id: share.settle(ticket_id, None)
    share.reserve("ab", 16, 0, (1,))

    share.take(Message(RankMessage.PROGRESS, pack_numbers("ab", 5)), quorum)

    assert not known


def test_a_rank_that_closes_its_socket_is_lost(peer: ConnectedRank) -> None:
    peer.there.close()

    assert peer.is_lost.wait(DEADLINE_S)
    assert peer.messages[0] == "rank 1 of 2 stopped transferring its KV: the other process closed the connection"


def test_a_put_carries_only_the_blocks_that_the_rank_does_not_know(peer: ConnectedRank) -> None:
    sender = peer.far.sender(None)  # type: ignore[arg-type]  # no ticket ends here
    blocks = tuple(range(8000))
    sender.begin(replace(TICKET, ticket_id="t"))
    tables = (blocks, blocks, (*blocks, 9000), blocks[:10], [*blocks[:9], 77])
    for layer, table in enumerate(tables):
        sender.put("t", layer, 0, 150, table)
    sender.put("gone", 0, 0, 150, blocks)
    sender.commit("t", b"")
    sender.put("t", 0, 0, 150, blocks)
    peer.far.send(RankMessage.CLOSE)

    received = [peer.received() for _ in range(len(tables) + 3)]
    assert [kind for kind, _ in received] == [
        RankMessage.BEGIN,
        *[RankMessage.PUT] * len(tables),
        RankMessage.COMMIT,
        RankMessage.CLOSE,
    ]
    puts = [unpack_numbers(payload, 5)[1] for kind, payload in received if kind == RankMessage.PUT]
    assert [len(numbers) - 5 for numbers in puts] == [8000, 0, 1, 10, 10]
    received_tables = TablesReceived()
    received_tables.begin("t")
    assert [received_tables.take("t", put[4], put[5:]) for put in puts] == [tuple(table) for table in tables]


def test_a_kept_block_table_is_reused_up_to_its_known_blocks() -> None:
    tables = TablesReceived()
    tables.begin("t")
    first = tables.take("t", 0, (4, 5))

    assert tables.take("t", 2, ()) is first
    assert tables.take("gone", 0, (1,)) is None
    with pytest.raises(ValueError, match="ticket t is to keep 3 of its blocks, but only 2 are known"):
        tables.take("t", 3, ())


@pytest.mark.parametrize("what", ["no message", "half a message", "no reader"])
def test_a_rank_closes_its_socket_on_a_broken_message_or_send(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.rank_transfer._SEND_S", 0.05)
    ours, theirs = socket.socketpair()
    pool = Pool(PoolLayout(tensors(3), num_blocks=4, block_size=16, rank=Rank(1, 2)))
    settings = replace(SETTINGS, port_range=None, secret=None)
    with Channel(ours, RankMessage) as there, RankTransfer(pool, settings, theirs, lambda: 0.0) as transfer:
        assert there.receive(DEADLINE_S).kind == RankMessage.HERE
        if what == "no reader":
            for _ in range(64):
                transfer._outbox.send(RankMessage.FAILED, bytes(1 << 20))
        else:
            ours.sendall(b"\xff\xff\xff\xff\x00\x00\x00\x00" if what == "no message" else b"\x01\x00")

        ended = select.poll()
        ended.register(ours, 0)  # poll always reports POLLHUP
        assert ended.poll(DEADLINE_S * 1000) == [(ours.fileno(), select.POLLHUP)]
    pool.close()


def test_a_rank_that_does_not_answer_is_lost_with_a_reason() -> None:
    ours, theirs = socket.socketpair()
    far = FarRank(ours, Rank(1, 2), InstanceLost, Trust())

    with pytest.raises(InstanceLost, match=r"rank 1 of 2 did not open its KV links: no message arrived within 0\.01 s"):
        far.start(0.01)
    theirs.close()
    with pytest.raises(
        InstanceLost, match="rank 1 of 2 did not open its KV links: the other process closed the connection"
    ):
        far.start(DEADLINE_S)
    far.close()


def test_a_rank_that_sends_an_invalid_message_is_lost_with_a_reason(peer: ConnectedRank) -> None:
    peer.far.sender(None)  # type: ignore[arg-type]  # no ticket ends here
    peer.there.send(RankMessage.ACKED, b"\xff", timeout_s=DEADLINE_S)

    assert peer.is_lost.wait(DEADLINE_S)
    assert peer.messages == ["invalid message from rank 1 of 2: a ticket's message of 1 bytes is too short"]
    assert peer.far.endpoints == (ENDPOINT,)


def test_a_rank_gets_a_new_tables_addresses_at_once() -> None:
    trust = Trust(addresses=LiveAddresses(["10.0.0.1"]))
    peer = ConnectedRank(trust)

    trust.follow(["10.0.0.1", "10.0.0.2"])

    assert peer.received() == (RankMessage.ADDRESSES, b"10.0.0.1\n10.0.0.2")
    trust.follow(["10.0.0.2", "10.0.0.1"])  # the same
    peer.far.send(RankMessage.ABORT, pack_bytes("t", b"why"))
    assert peer.received()[0] == RankMessage.ABORT
    peer.far.close()
    trust.follow(["10.0.0.3"])  # must not reach the closed rank
    with pytest.raises(ChannelClosed):
        peer.received()
    peer.there.close()


def test_only_links_of_rank_0_are_measured() -> None:
    ours, theirs = socket.socketpair()
    far = FarRank(ours, Rank(1, 2), InstanceLost, Trust())

    with pytest.raises(
        Unavailable, match="the link to decode-0 starts at rank 1 of 2, whose process does not measure links"
    ):
        far.sender(None).measure("decode-0", 7, (), 1, 1.0)  # type: ignore[arg-type]
    far.close()
    theirs.close()


def test_messages_between_ranks_round_trip() -> None:
    ticket = TICKET
    stats = SendStats("tcp", 1 << 40, 0.5, 1, 7)
    status = LinkStatus("d", "tcp", "up", 9, 1, 2, 3, 0.1, 0.2, ("shm: no",))
    counters = RankCounters(((("d", 9), status),), 5, 6, ReceiverCounts(1, 2))

    for message in (ticket, stats, counters, SETTINGS):
        assert from_json(type(message), to_json(message)) == message
    assert from_json(tuple[KvEndpoint, ...], to_json([ENDPOINT])) == (ENDPOINT,)
    assert "ab" * 32 not in repr(SETTINGS)
    assert unpack_numbers(pack_numbers("ab", 1, -2, blocks=(1 << 40, 3)), 4) == ("ab", [1, -2, 1 << 40, 3])
    assert unpack_bytes(pack_bytes("ab", b"rest")) == ("ab", b"rest")
    error = unpack_error(pack_error(HandoffFailed("why")))
    assert (type(error), str(error)) == (HandoffFailed, "why")
    assert unpack_error(pack_error(None)) is None


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x05\x00abc", pack_numbers("ab", 1), pack_bytes("ab", b"1234567")])
def test_invalid_messages_about_a_ticket_are_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"bytes|integers"):
        unpack_numbers(payload, 2)
    with pytest.raises(ValueError, match="not a Ticket"):
        from_json(Ticket, b'{"ticket_id": "x"}')
