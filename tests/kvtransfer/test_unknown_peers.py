"""Peers that never identify themselves: they cost little, and keep no other peer out."""

import contextlib
import logging
import os
import secrets
import socket
import threading
from dataclasses import replace

import pytest

from kvtransfer.connection_limit import MAX_WAITING, MAX_WAITING_OF_ADDRESS, ConnectionLimit
from kvtransfer.digest import Region, RegionRuns, StopFlag, digest_of
from kvtransfer.hello import Hello
from kvtransfer.incoming import Incoming
from kvtransfer.inflow import FrameVerdict, Inflow, SendingRank
from kvtransfer.link_codec import MAX_FRAME_BLOCKS
from kvtransfer.link_messages import Frame
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.shm import ShmInlet
from kvtransfer.staging import whole
from kvtransfer.terms import RankHeads, Terms
from security.secret import Secret
from security.trust import Trust
from telemetry.capped_logs import LINES
from tests.kvtransfer.rig import DEADLINE_S, TENSORS, Pool, Recorder, until
from wire.errors import HandoffFailed, Unavailable
from wire.kv_layout import Heads, KvTensor, PoolLayout, Rank
from wire.types import PROTOCOL_VERSION

LAYOUT = PoolLayout(TENSORS, num_blocks=8, block_size=4)
TRUST = Trust(Secret(b"s" * 32))
STRANGERS = Trust(None, frozenset({"192.0.2.1"}), loopback=False)


class House:
    """A receiver with a TCP listener, and its clients."""

    def __init__(self, trust: Trust, stack: contextlib.ExitStack) -> None:
        self.trust, self.stack, self.events, self.pool = trust, stack, Recorder(), Pool(LAYOUT)
        stack.callback(self.pool.close)
        self.receiver = KvReceiver(
            self.pool, instance_id="decode-0", epoch=77, host="127.0.0.1", transports=("tcp",), events=self.events,
            trust=trust, progress_timeout_s=DEADLINE_S,
        )  # fmt: skip
        stack.callback(self.receiver.close)

    def call(self, address: str = "127.0.0.1") -> socket.socket:
        """Connect and send nothing."""
        host, _, port = self.receiver.endpoints[0].address.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=DEADLINE_S, source_address=(address, 0))
        return self.stack.enter_context(sock)

    def hand_over(self) -> None:
        """Let a ticket of a known peer be acked."""
        pool = Pool(LAYOUT)
        self.stack.callback(pool.close)
        sender = KvSender(
            pool, instance_id="prefill-0", epoch=55, transports=("tcp",), events=self.events, trust=self.trust,
            progress_age=lambda: 0.0, progress_timeout_s=DEADLINE_S,
        )  # fmt: skip
        self.stack.callback(sender.close)
        ticket = self.receiver.open(secrets.token_hex(16), num_tokens=4, first_token=0, block_ids=(1,))
        sender.begin(ticket)
        for layer in range(LAYOUT.num_layers):
            sender.put(ticket.ticket_id, layer, 0, 4, (0,))
        sender.commit(ticket.ticket_id, b"prompt")
        self.events.wait("acked", ticket.ticket_id)


def test_silent_unknown_peers_hold_few_threads_and_block_nobody() -> None:
    with contextlib.ExitStack() as stack:
        house = House(TRUST, stack)
        callers = [house.call() for _ in range(3 * MAX_WAITING_OF_ADDRESS)]

        until(lambda: house.receiver.counts.refused_connections == len(callers) - MAX_WAITING_OF_ADDRESS)
        until(lambda: len(house.receiver._links) == MAX_WAITING_OF_ADDRESS)
        assert callers[0].recv(1) == b""  # the oldest gave way
        house.hand_over()


def test_unknown_peers_of_many_addresses_stay_within_the_total_limit() -> None:
    with contextlib.ExitStack() as stack:
        house = House(TRUST, stack)
        addresses = [f"127.0.1.{number}" for number in range(1, 7)]
        callers = [house.call(address) for address in addresses for _ in range(MAX_WAITING_OF_ADDRESS)]

        until(lambda: house.receiver.counts.refused_connections == len(callers) - MAX_WAITING)
        until(lambda: len(house.receiver._links) == MAX_WAITING)  # counted first, then forgotten
        house.hand_over()


def test_without_a_secret_an_address_outside_the_table_gets_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    made = threading.Event()
    with contextlib.ExitStack() as stack:
        house = House(STRANGERS, stack)
        monkeypatch.setattr("kvtransfer.receiver.Incoming", lambda *given, **named: made.set())
        caller = house.call()

        message = b""
        with contextlib.suppress(ConnectionResetError):
            while data := caller.recv(4096):
                message += data

        assert b"127.0.0.1 is not in the global table" in message
        until(lambda: house.receiver.counts.refused_connections == 1)
        assert not made.is_set()


@pytest.mark.parametrize("trust", [TRUST, STRANGERS])
def test_repeated_calls_of_unknown_peers_do_not_fill_the_log(trust: Trust, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pdserve.kvtransfer"), contextlib.ExitStack() as stack:
        house = House(trust, stack)
        for number in range(3 * LINES):
            with house.call() as caller, contextlib.suppress(OSError):
                caller.sendall(b"garbage %d" % number)
        until(lambda: house.receiver.counts.refused_connections == 3 * LINES)

    messages = [record for record in caplog.records if record.name == "pdserve.kvtransfer"]
    assert 0 < len(messages) <= 2 * LINES


def test_close_waits_for_all_connections_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.receiver._JOIN_S", 0.8)
    frozen = threading.Event()

    def run(self: Incoming) -> None:
        frozen.wait(3 * DEADLINE_S)
        self._clean_up("a caller", "the test is over")

    monkeypatch.setattr(Incoming, "_run", run)
    with contextlib.ExitStack() as stack:
        stack.callback(frozen.set)
        house = House(TRUST, stack)
        for _ in range(40):
            house.call()
        until(lambda: len(house.receiver._links) == 40)
        closing = threading.Thread(target=house.receiver.close)

        closing.start()
        closing.join(DEADLINE_S)  # one after another they would take 32 s

        assert not closing.is_alive()
        frozen.set()


def test_a_full_receiver_refuses_until_a_ticket_ends() -> None:
    limit = ConnectionLimit(max_inside=1)
    for number in (1, 2):
        limit.wait(number, "192.0.2.1", lambda: None)
    limit.enter(1)

    with pytest.raises(Unavailable, match="1 KV links are open, and the limit is 1"):
        limit.enter(2)
    limit.leave(1)
    limit.enter(2)

    assert limit.num_waiting == 0


def test_a_connection_that_was_evicted_does_not_enter() -> None:
    limit, gone = ConnectionLimit(max_waiting=2), []
    for number in (1, 2, 3):
        limit.wait(number, None, lambda number=number: gone.append(number))  # type: ignore[misc]

    assert gone == [1]
    with pytest.raises(Unavailable, match="displaced"):
        limit.enter(1)
    limit.enter(2)


def test_accepted_peers_do_not_count_as_waiting() -> None:
    limit, gone = ConnectionLimit(max_waiting_of_address=1), []
    for number in range(5):
        limit.wait(number, "192.0.2.1", lambda number=number: gone.append(number))  # type: ignore[misc]
        limit.enter(number)

    assert not gone


def _inflow() -> Inflow:
    part = RankHeads([KvTensor(0, "k", 1, 4, "float32")], [Heads(0, 1)])
    return Inflow(SendingRank("prefill-0", 1, Rank(0, 1)), Terms(part, 0, 100), 1e9)


def _frame(number: int, block_ids: tuple[int, ...], digest: int = 0) -> Frame:
    return Frame("00" * 16, 1, number, 0, 0, 4 * number, 4 * number + 4, 0, 1, 64, digest, block_ids)


@pytest.mark.parametrize("num_blocks", [6, MAX_FRAME_BLOCKS])
def test_more_blocks_than_a_frames_tokens_can_touch_are_refused(num_blocks: int) -> None:
    with pytest.raises(HandoffFailed, match=f"names {num_blocks} blocks, but the limit is 5"):
        _inflow().accept(_frame(0, tuple(range(num_blocks))))


@pytest.mark.parametrize("num_tensors", [0, 3, 2**32 - 1])
def test_a_frame_of_no_tensors_or_of_more_than_there_are_is_refused(num_tensors: int) -> None:
    part = RankHeads([KvTensor(0, name, 1, 4, "float32") for name in "kv"], [Heads(0, 1)] * 2)
    inflow = Inflow(SendingRank("prefill-0", 1, Rank(0, 1)), Terms(part, 0, 100), 1e9)

    with pytest.raises(HandoffFailed, match=rf"tensors \[0, {num_tensors}\) .* is not among the 2 KV tensors here"):
        inflow.accept(replace(_frame(0, ()), num_tensors=num_tensors))


def test_tensors_of_other_heads_share_no_frame() -> None:
    part = RankHeads([KvTensor(0, "k", 1, 4, "float32"), KvTensor(0, "v", 2, 4, "float32")], [Heads(0, 1), Heads(0, 2)])
    inflow = Inflow(SendingRank("prefill-0", 1, Rank(0, 1)), Terms(part, 0, 100), 1e9)

    with pytest.raises(HandoffFailed, match=r"tensors \[0, 2\) .*: heads \[0, 1\) sent, \[0, 2\) expected"):
        inflow.accept(replace(_frame(0, ()), num_tensors=2, num_bytes=192))


def test_no_list_of_blocks_is_held_once_its_frame_was_moved() -> None:
    inflow = _inflow()
    frames = [_frame(number, (9_001, 9_002, 9_003, 9_004, 9_005 + number)) for number in range(3)]
    again = _frame(0, (9_001, 9_002, 9_003, 9_004, 9_005))
    for one in frames:
        assert inflow.accept(one) is FrameVerdict.MOVE
    inflow.finish(0, 1)  # corrupt: it comes once more
    assert inflow.accept(again) is FrameVerdict.MOVE
    for number in range(3):
        inflow.finish(number, 0)

    assert not [one for one in inflow._frames.values() if one.frame.block_ids]


def test_a_closed_inlet_has_the_senders_pool_unmapped() -> None:
    pool = Pool(LAYOUT)
    hello = Hello(PROTOCOL_VERSION, "prefill-0", 5, 1, "decode-0", 77, "shm", 4, 8, TENSORS, digests=True)
    before = _num_mappings(pool)
    assert pool.fd is not None
    inlet = ShmInlet(pool.fd, hello)
    assert _num_mappings(pool) == before + 1
    target = bytearray(4 * 64)
    frame = Frame("00" * 16, 1, 0, 0, 0, 0, 4, 0, 2, len(target), 0, (1,), 1)
    digest = inlet.move(frame, RegionRuns(Region(target), 0, whole(len(target))), StopFlag())
    assert digest == digest_of([bytes(target)])

    inlet.close()

    assert _num_mappings(pool) == before
    pool.close()


def _num_mappings(pool: Pool) -> int:
    """Of this pool alone: those of other tests go when their memory is collected."""
    assert pool.fd is not None
    inode = str(os.fstat(pool.fd).st_ino)
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sum("memfd:test-pool" in line and line.split()[4] == inode for line in file)
