"""Several links to a peer, peers that do not affect one another, and how links end."""

import itertools
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvtransfer.all_ranks import RanksSender
from kvtransfer.interface import PoolMemory, SenderEvents
from kvtransfer.link import Link
from kvtransfer.link_messages import Commit
from kvtransfer.outgoing_tickets import OutgoingTickets
from kvtransfer.peer import FORGET_AFTER_S
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.tcp import TcpOutlet
from tests.kvtransfer.faulty import BOTH, begin_half, faulty_rig, finish, hand_over
from tests.kvtransfer.rig import DEADLINE_S, Rig, fill, make_rig, read, until
from wire.errors import PdserveError
from wire.types import KvEndpoint, Ticket


def _links_up(rig: Rig) -> list[Link]:
    return [link for peer in rig.sender._peers.values() for link in peer.links() if link.state == "up"]


def _thread_names(prefix: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]


@contextmanager
def _unresponsive_peers(count: int) -> Iterator[list[KvEndpoint]]:
    """Peers that accept connections and never send anything."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        yield [KvEndpoint("tcp", f"127.0.0.1:{server.getsockname()[1]}") for server in servers]
    finally:
        for server in servers:
            server.close()


def _ticket_of(peer_id: str, endpoint: KvEndpoint) -> Ticket:
    return Ticket(secrets.token_hex(16), 99, peer_id, 20, 0, 30.0, (endpoint,))


def test_a_second_link_is_dialled_beside_a_loaded_one() -> None:
    with make_rig("tcp") as rig:
        one = begin_half(rig, 0)
        assert len(_links_up(rig)) == 1
        two = begin_half(rig, 5)
        until(lambda: len(_links_up(rig)) == 2)
        three = begin_half(rig, 10)
        four = begin_half(rig, 15)

        ticket_bytes = 20 * rig.p_pool.layout.token_bytes
        assert sorted(link.load for link in _links_up(rig)) == [2 * ticket_bytes] * 2
        assert len(rig.receiver._links) == 2
        assert len(rig.sender.links()) == 1
        for first_block, ticket in zip((0, 5, 10, 15), (one, two, three, four), strict=True):
            finish(rig, ticket, first_block)
        assert [link.load for link in _links_up(rig)] == [0, 0]
        assert rig.sender.bytes_sent == 4 * ticket_bytes


def test_aborted_and_failed_tickets_count_as_no_load() -> None:
    with make_rig("tcp") as rig:
        aborted, failed = begin_half(rig, 0), begin_half(rig, 5)

        rig.sender.abort(aborted.ticket_id, "changed my mind")
        rig.receiver.abort(failed.ticket_id, "not any more")
        rig.events.wait("failed", failed.ticket_id)

        until(lambda: [link.load for link in _links_up(rig)] == [0] * len(_links_up(rig)))


def test_shared_memory_needs_only_one_link() -> None:
    with make_rig("shm") as rig:
        tickets = [begin_half(rig, 5 * i) for i in range(4)]

        assert len(_links_up(rig)) == len(rig.receiver._links) == 1
        assert [finish(rig, ticket, 5 * i) for i, ticket in enumerate(tickets)] == ["shm"] * 4


def test_shared_memory_needs_only_one_link_even_while_that_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    known, resume = threading.Event(), threading.Event()

    def stop_at_transport(link: Link, name: str, value: object) -> None:
        object.__setattr__(link, name, value)
        if name == "transport" and value:
            known.set()
            assert resume.wait(DEADLINE_S)

    monkeypatch.setattr(Link, "__setattr__", stop_at_transport)
    with make_rig("shm") as rig:
        tickets = [rig.open(20, range(5 * i, 5 * i + 5)) for i in range(3)]
        rig.hand_over(tickets[0], range(5))
        assert known.wait(DEADLINE_S)
        for i in (1, 2):
            rig.hand_over(tickets[i], range(5 * i, 5 * i + 5))
        resume.set()
        for ticket in tickets:
            rig.events.wait("acked", ticket.ticket_id)

        assert len([link for peer in rig.sender._peers.values() for link in peer.links()]) == 1


def test_a_second_link_that_cannot_be_dialled_harms_no_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_rig(monkeypatch, ("tcp",)) as (rig, made):
        one = begin_half(rig, 0)
        made["tcp"].refuses = True
        two = begin_half(rig, 5)
        until(lambda: made["tcp"].num_connects == 2)
        until(lambda: len(_thread_names("kv-out")) == 1)
        three = begin_half(rig, 10)

        assert {finish(rig, t, b) for t, b in ((one, 0), (two, 5), (three, 10))} == {"tcp"}
        assert made["tcp"].num_connects == 2


def test_a_slow_dial_of_a_second_link_delays_no_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_rig(monkeypatch, ("tcp",)) as (rig, made):
        one = begin_half(rig, 0)
        made["tcp"].free.clear()
        two = begin_half(rig, 5)
        assert made["tcp"].waiting.wait(DEADLINE_S)

        assert [hand_over(rig, 10) for _ in range(3)] == ["tcp"] * 3
        assert {finish(rig, one, 0), finish(rig, two, 5)} == {"tcp"}
        assert made["tcp"].num_connects == 2


def test_the_loss_of_one_link_leaves_the_other_links_tickets_alone() -> None:
    with make_rig("tcp") as rig:
        begin_half(rig, 0)
        begin_half(rig, 5)
        until(lambda: len(_links_up(rig)) == 2)
        other = begin_half(rig, 10)
        by_load = sorted(_links_up(rig), key=lambda link: link.load)
        assert by_load[1]._stream is not None

        by_load[1]._stream.shutdown()
        until(lambda: rig.events.count("failed") == 2)

        assert finish(rig, other, 10) == "tcp"
        assert hand_over(rig, 20) == "tcp"
        assert rig.sender.links()[0].state == "up"


def test_a_peer_that_never_answers_delays_no_other_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.sender._JOIN_S", 1.0)
    with _unresponsive_peers(3) as endpoints, make_rig("tcp", progress_timeout_s=60.0) as rig:
        for number, endpoint in enumerate(endpoints):
            rig.sender.begin(_ticket_of(f"deaf-{number}", endpoint))

        tokens = fill(rig.p_pool, range(1, 6), 20)
        assert hand_over(rig) == "tcp"

        assert read(rig.d_pool, range(1, 6), 20) == tokens
        assert sorted(link.state for link in rig.sender.links()) == ["connecting"] * 3 + ["up"]


def test_close_waits_for_all_links_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.sender._JOIN_S", 1.0)
    with _unresponsive_peers(40) as endpoints, make_rig("tcp", progress_timeout_s=60.0) as rig:
        for number, endpoint in enumerate(endpoints):
            rig.sender.begin(_ticket_of(f"deaf-{number}", endpoint))
        closing = threading.Thread(target=rig.sender.close)

        closing.start()
        closing.join(DEADLINE_S)  # one after another they would take 32 s

        assert not closing.is_alive()
        until(lambda: _thread_names("kv-out-deaf") == [])


def test_a_stalled_receiver_keeps_no_thread_of_a_closed_sender() -> None:
    with make_rig("tcp", progress_timeout_s=60.0) as rig:
        hand_over(rig)
        for link in list(rig.receiver._links.values()):
            link.answer(b"PDKV")

        rig.sender.close()

        assert _thread_names("kv-out") == _thread_names("kv-back") == []


def test_a_delayed_reader_closes_the_connection_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    received, resume = threading.Event(), threading.Event()

    def hold_up(*args: object) -> object:
        received.set()
        assert resume.wait(DEADLINE_S)
        raise RuntimeError("a defect")

    monkeypatch.setattr("kvtransfer.link_reader._JOIN_S", 0.05)
    monkeypatch.setattr("kvtransfer.link_reader.decode", hold_up)
    with make_rig("tcp") as rig:
        ticket = begin_half(rig)
        rig.receiver.abort(ticket.ticket_id, "over")
        assert received.wait(DEADLINE_S)
        (link,) = _links_up(rig)
        rig.sender.close()
        assert link._stream is not None
        assert link._stream.socket.fileno() >= 0, "closed under its reader: the number may be another socket's by now"

        resume.set()
        until(lambda: link._stream is not None and link._stream.socket.fileno() == -1)
        until(lambda: _thread_names("kv-back") == [])
    assert "kv_thread_still_running" in caplog.text


def test_a_ticket_begun_while_a_link_is_torn_down_uses_another(monkeypatch: pytest.MonkeyPatch) -> None:
    closing, resume, close = threading.Event(), threading.Event(), TcpOutlet.close

    def hold_up(outlet: TcpOutlet) -> None:
        closing.set()
        assert resume.wait(DEADLINE_S)
        close(outlet)

    monkeypatch.setattr(TcpOutlet, "close", hold_up)
    with make_rig("tcp") as rig:
        try:
            unlucky = begin_half(rig)
            for link in list(rig.receiver._links.values()):
                link.shutdown()
            assert closing.wait(DEADLINE_S)

            assert hand_over(rig, 20) == "tcp"

            assert rig.events.count("failed") == 0
        finally:
            resume.set()
        rig.events.wait("failed", unlucky.ticket_id)


def test_without_a_reader_thread_ticket_and_connection_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make_rig("tcp") as rig:
        ticket = rig.open(20, range(5))
        with monkeypatch.context() as patch:
            patch.setattr("kvtransfer.link_reader.threading.Thread.start", _start_no_reader)
            rig.sender.begin(ticket)
            rig.events.wait("failed", ticket.ticket_id)

        assert "can't start new thread" in str(rig.events.failures[ticket.ticket_id])
        until(lambda: not rig.receiver._links)
        assert hand_over(rig) == "tcp"


_START = threading.Thread.start


def _start_no_reader(self: threading.Thread) -> None:
    if self.name.startswith("kv-back"):
        raise RuntimeError("can't start new thread")
    _START(self)


@pytest.mark.parametrize("transport", BOTH)
def test_an_ack_received_before_the_link_was_lost_counts(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resume, commit = threading.Event(), OutgoingTickets._commit

    def hold_up(self: OutgoingTickets, made: Commit) -> None:
        commit(self, made)
        self._outbox.flush()
        assert resume.wait(DEADLINE_S)

    monkeypatch.setattr(OutgoingTickets, "_commit", hold_up)
    with make_rig(transport) as rig:
        ticket = rig.open(20, range(5))
        rig.hand_over(ticket, range(5))
        rig.events.wait("committed", ticket.ticket_id)
        (link,) = _links_up(rig)
        until(lambda: link._queue.qsize() > 0)  # the ACK; the writer is still blocked

        for receiving in list(rig.receiver._links.values()):
            receiving.shutdown()
        resume.set()
        rig.events.wait("acked", ticket.ticket_id)

        until(lambda: link.state == "down")
        assert rig.events.count("failed") == 0


@contextmanager
def _newer_process(rig: Rig, transport: str) -> Iterator[KvReceiver]:
    """A newer process of the same instance: another epoch, its own blocks."""
    receiver = KvReceiver(
        rig.d_pool, instance_id="decode-0", epoch=78, host="127.0.0.1", transports=(transport,), events=rig.events
    )
    try:
        yield receiver
    finally:
        receiver.close()


def _open_there(receiver: KvReceiver, blocks: range) -> Ticket:
    return receiver.open(secrets.token_hex(16), num_tokens=20, first_token=0, block_ids=blocks)


@pytest.mark.parametrize("transport", BOTH)
def test_a_late_ticket_of_an_older_epoch_cuts_no_newer_link(transport: str) -> None:
    with make_rig(transport) as rig, _newer_process(rig, transport) as newer:
        hand_over(rig)
        under_way = _open_there(newer, range(20, 25))
        rig.sender.begin(under_way)
        until(lambda: len(rig.sender.links()) == 1)

        late = rig.open(20, range(30, 35))
        rig.hand_over(late, range(30, 35))
        rig.events.wait("acked", late.ticket_id)
        rig.put_all(under_way, range(20, 25))
        rig.sender.commit(under_way.ticket_id, b"")
        rig.events.wait("acked", under_way.ticket_id)
        until(lambda: len(rig.sender.links()) == 1)

        assert rig.events.count("failed") == 0
        assert len(newer._links) == 1
        until(lambda: not rig.receiver._links)
        assert rig.sender.bytes_sent == 60 * rig.p_pool.layout.token_bytes


def test_an_older_epoch_is_current_again_without_a_newer_one() -> None:
    with make_rig("tcp") as rig:
        hand_over(rig)
        with _newer_process(rig, "tcp") as newer:
            ticket = _open_there(newer, range(20, 25))
            rig.hand_over(ticket, range(20, 25))
            rig.events.wait("acked", ticket.ticket_id)
        until(lambda: [link.state for link in rig.sender.links()] == ["down"])

        for _ in range(2):
            assert hand_over(rig, 30) == "tcp"

        until(lambda: [link.state for link in rig.sender.links()] == ["up"])
        until(lambda: len(rig.receiver._links) == 1)  # the one before ends on a thread of its own


def test_a_ticket_begun_while_its_link_drains_goes_over_another() -> None:
    with make_rig("tcp") as rig:
        under_way = begin_half(rig)
        (link,) = _links_up(rig)
        link.drain()

        assert hand_over(rig, 20) == "tcp"
        assert finish(rig, under_way) == "tcp"

        until(lambda: link.state == "down")
        assert rig.sender.links()[0].failures == 0


def test_a_link_draining_before_it_is_up_serves_its_ticket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with faulty_rig(monkeypatch, ("tcp",)) as (rig, made):
        tcp, first, second = made["tcp"], made["tcp"].free, threading.Event()
        first.clear()
        one, two = rig.open(20, range(5)), rig.open(20, range(5, 10))
        rig.hand_over(one, range(5))
        assert tcp.waiting.wait(DEADLINE_S)
        (peer,) = rig.sender._peers.values()
        (link,) = peer.links()
        link.drain()
        tcp.free = second
        rig.hand_over(two, range(5, 10))
        until(lambda: tcp.num_connects == 2)

        first.set()
        rig.events.wait("acked", one.ticket_id)
        second.set()
        rig.events.wait("acked", two.ticket_id)

        assert rig.events.count("failed") == 0


def test_if_no_thread_can_be_started_the_ticket_fails_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_rig("tcp") as rig:
        ticket = rig.open(20, range(5))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _no_thread)
            rig.sender.begin(ticket)

        assert "no thread for a KV link to decode-0" in str(rig.events.failures[ticket.ticket_id])
        assert hand_over(rig) == "tcp"


def _no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_tickets_end_once_while_links_are_cut_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_rig(monkeypatch, num_blocks=512) as (rig, made):
        tickets = [rig.open(4, (block,)) for block in range(300)]
        for number, (ticket, transport) in enumerate(zip(tickets, itertools.cycle(made.values()), strict=False)):
            rig.hand_over(ticket, (number,))
            if number % 25 == 24:
                rig.clock.now += 0.5
                transport.cut()
        until(lambda: rig.events.count("acked") + rig.events.count("failed") >= 300)

        endings = [ticket_id for kind, ticket_id in rig.events.reports if kind in ("acked", "failed")]
        assert sorted(endings) == sorted(ticket.ticket_id for ticket in tickets)
        assert all(link.load == 0 for link in _links_up(rig))
        assert hand_over(rig) in BOTH


def test_bytes_sent_before_the_commit_count_as_early() -> None:
    with make_rig("tcp") as rig:
        ticket = begin_half(rig)
        finish(rig, ticket)

        stats, token_bytes = rig.events.acks[ticket.ticket_id], rig.p_pool.layout.token_bytes
        assert 8 * token_bytes <= stats.early_bytes <= stats.kv_bytes == 20 * token_bytes


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_owner_that_raises_on_a_finish_affects_one_ticket(transport: str) -> None:
    with make_rig(transport) as rig:
        tickets = [rig.open(4, (block,)) for block in (1, 2, 3)]
        failed = rig.events.failed
        broken: list[str] = []

        def break_once(ticket_id: str, error: PdserveError) -> None:
            failed(ticket_id, error)
            if not broken:
                broken.append(ticket_id)
                raise RuntimeError("a defect of the owner")

        rig.events.failed = break_once  # type: ignore[method-assign]
        for ticket in tickets:
            rig.sender.begin(ticket)
        until(lambda: all(link.state == "up" for link in rig.sender.links()) and bool(rig.sender.links()))
        for incoming in list(rig.receiver._links.values()):
            incoming.shutdown()  # no ABORT is sent: the link's end reports it to all of them
        for ticket in tickets:
            rig.events.wait("failed", ticket.ticket_id)

        assert len(broken) == 1


def test_a_departed_peer_is_forgotten_but_its_bytes_are_counted() -> None:
    with make_rig("tcp") as rig:
        hand_over(rig)
        sent = rig.sender.bytes_sent
        for link in _links_up(rig):
            link.end()
        until(lambda: [link.state for link in rig.sender.links()] == ["down"])
        gone_at = rig.clock.now

        rig.clock.now = gone_at + FORGET_AFTER_S - 1
        assert [link.state for link in rig.sender.links()] == ["down"]
        rig.clock.now = gone_at + FORGET_AFTER_S
        until(lambda: rig.sender.links() == ())  # down first, then its thread ends

        assert rig.sender.bytes_sent == sent > 0
        assert rig.sender._epochs == {}
        assert hand_over(rig, 30) == "tcp"
        assert rig.sender.bytes_sent == 2 * sent


def test_an_idle_or_redialled_peer_is_not_forgotten() -> None:
    with make_rig("tcp") as rig:
        hand_over(rig)
        rig.clock.now += 2 * FORGET_AFTER_S
        assert [link.state for link in rig.sender.links()] == ["up"]

        for link in _links_up(rig):
            link.end()
        until(lambda: [link.state for link in rig.sender.links()] == ["down"])
        rig.clock.now += FORGET_AFTER_S - 1
        assert hand_over(rig, 30) == "tcp"
        assert rig.sender.links()[0].bytes_sent == rig.sender.bytes_sent


@pytest.mark.parametrize("transport", BOTH)
def test_counts_of_an_older_epoch_stay_with_their_instance(transport: str) -> None:
    with make_rig(transport) as rig:
        hand_over(rig)
        for connection in list(rig.receiver._links.values()):
            connection.shutdown()  # a loss
        until(lambda: rig.sender.links()[0].failures == 1)
        with _newer_process(rig, transport) as newer:
            ticket = _open_there(newer, range(20, 25))
            rig.hand_over(ticket, range(20, 25))
            rig.events.wait("acked", ticket.ticket_id)
            until(lambda: len(rig.sender.links()) == 1)

            (reported,) = rig.sender.links()
            assert (reported.state, reported.failures) == ("up", 1)
            assert reported.bytes_sent == rig.sender.bytes_sent == 40 * rig.p_pool.layout.token_bytes


def test_close_waits_for_the_links_of_all_ranks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.sender._JOIN_S", 1.0)
    with _unresponsive_peers(40) as endpoints, make_rig("tcp") as rig:
        made: list[KvSender] = []

        def make(memory: PoolMemory, events: SenderEvents) -> KvSender:
            sender = KvSender(
                memory, instance_id="prefill-0", epoch=55, transports=("tcp",), events=events,
                progress_age=lambda: 0.0, progress_timeout_s=60.0,
            )  # fmt: skip
            made.append(sender)
            return sender

        ranks = RanksSender([rig.p_pool] * len(endpoints), rig.events, make)
        for number, endpoint in enumerate(endpoints):
            made[number].begin(_ticket_of(f"deaf-{number}", endpoint))
        closing = threading.Thread(target=ranks.close)

        closing.start()
        closing.join(DEADLINE_S)  # one after another they would take 32 s

        assert not closing.is_alive()
        until(lambda: _thread_names("kv-out-deaf") == [])
