"""The receiver's checks of new connections: which are refused, why, and at what cost."""

import contextlib
import pickle
import secrets
import socket
import threading
from collections.abc import Sequence

import pytest

from kvtransfer.digest import Region, RegionRuns
from kvtransfer.hello import Hello, encode_hello
from kvtransfer.link_codec import MAGIC, MAX_FRAME_BYTES, PREFIX
from kvtransfer.link_messages import MessageType, Open, Renew
from kvtransfer.proof import encode_proof, no_proof
from kvtransfer.quorum import Quorum
from kvtransfer.receiver import KvReceiver
from kvtransfer.shm import POOL_SEALS
from kvtransfer.staging import whole
from kvtransfer.stream import Stream, expect
from kvtransfer.tcp import TcpOutlet
from security.trust import Trust
from tests.kvtransfer.every_transport import EVERY_TRANSPORT
from tests.kvtransfer.rig import DEADLINE_S, TENSORS, RawSender, Rig, endpoint_of, fill, make_rig, read, until
from wire.errors import ConfigError, Incompatible, InstanceLost, Unavailable
from wire.kv_layout import KvTensor
from wire.types import PROTOCOL_VERSION, KvEndpoint, Ticket

BLOCKS = (1, 2, 3, 4, 5)
BOTH = ("shm", "tcp")


def _fail(rig: Rig, ticket: Ticket) -> Exception:
    rig.sender.begin(ticket)
    rig.events.wait("failed", ticket.ticket_id)
    return rig.events.failures[ticket.ticket_id]


@pytest.mark.parametrize("transport", EVERY_TRANSPORT)
@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ([*TENSORS[:5]], "KV tensors: 6 here, 5 there"),
        ([*TENSORS[:5], KvTensor(2, "v", 2, 8, "bfloat16")], "v 2x8 float32 here, v 2x8 bfloat16 there"),
        ([*TENSORS[:5], KvTensor(2, "v", 4, 4, "float32")], "v 2x8 float32 here, v 4x4 float32 there"),
    ],
)
def test_another_layout_is_refused_with_both_values(transport: str, theirs: Sequence[KvTensor], words: str) -> None:
    with make_rig(transport, sender_tensors=theirs) as rig:
        error = _fail(rig, rig.open(20, BLOCKS))

        assert isinstance(error, Incompatible)
        assert words in str(error)
        until(lambda: rig.receiver.counts.refused_connections == 1)


@pytest.mark.parametrize("transport", EVERY_TRANSPORT)
def test_another_protocol_version_is_refused_with_both_versions(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_rig(transport) as rig:
        monkeypatch.setattr("kvtransfer.link.PROTOCOL_VERSION", 42)
        error = _fail(rig, rig.open(20, BLOCKS))

        assert isinstance(error, Incompatible)
        assert f"version {PROTOCOL_VERSION} here, 42 there" in str(error)


@pytest.mark.parametrize("transport", EVERY_TRANSPORT)
def test_a_link_to_an_older_process_is_refused_with_both_epochs(transport: str) -> None:
    with make_rig(transport) as rig:
        ticket = rig.open(20, BLOCKS)
        stale = Ticket(ticket.ticket_id, 0xBEEF, ticket.instance_id, 20, 0, 30.0, ticket.endpoints)
        error = _fail(rig, stale)

        assert isinstance(error, InstanceLost)
        assert "epoch beef, but this is decode-0 epoch 4d" in str(error)


@pytest.mark.parametrize("seals", [0, POOL_SEALS & ~0x0010, POOL_SEALS & ~0x0002])
def test_an_unsealed_pool_is_refused_with_its_seals(seals: int) -> None:
    with make_rig("shm", sender_seals=seals) as rig:
        error = _fail(rig, rig.open(20, BLOCKS))

        assert f"seals {seals:#x}, but {POOL_SEALS:#x} are required" in str(error)


def test_a_pool_that_shared_memory_cannot_serve_goes_over_tcp() -> None:
    with make_rig("shm", sender_seals=0, sender_transports=BOTH, receiver_transports=BOTH) as rig:
        tokens = fill(rig.p_pool, BLOCKS, 20)
        ticket = rig.open(20, BLOCKS)

        rig.hand_over(ticket, BLOCKS)
        rig.events.wait("acked", ticket.ticket_id)

        assert read(rig.d_pool, BLOCKS, 20) == tokens
        assert rig.events.acks[ticket.ticket_id].transport == "tcp"


def test_peers_on_one_host_use_shared_memory_and_others_tcp() -> None:
    with make_rig("shm", sender_transports=BOTH, receiver_transports=BOTH) as rig:
        near, far = rig.open(20, BLOCKS), rig.open(20, BLOCKS)
        shm, tcp = endpoint_of(rig, "shm"), endpoint_of(rig, "tcp")
        rig.hand_over(near, BLOCKS)
        rig.events.wait("acked", near.ticket_id)
        assert rig.events.acks[near.ticket_id].transport == "shm"

    with make_rig("shm", sender_transports=BOTH, receiver_transports=BOTH) as rig:
        far = rig.open(20, BLOCKS)
        shm, tcp = endpoint_of(rig, "shm"), endpoint_of(rig, "tcp")
        elsewhere = (KvEndpoint("shm", shm.address, "another boot"), tcp)
        rig.hand_over(Ticket(far.ticket_id, 77, "decode-0", 20, 0, 30.0, elsewhere), BLOCKS)
        rig.events.wait("acked", far.ticket_id)
        assert rig.events.acks[far.ticket_id].transport == "tcp"


def test_no_common_transport_names_both_lists() -> None:
    with make_rig("shm", sender_transports=("tcp",)) as rig:
        error = _fail(rig, rig.open(20, BLOCKS))

        assert isinstance(error, Incompatible)
        assert "['tcp'] here, ['shm'] there" in str(error)


def test_an_address_nobody_listens_on_fails_with_the_reason() -> None:
    with make_rig("tcp") as rig:
        ticket = rig.open(20, BLOCKS)
        nowhere = Ticket(ticket.ticket_id, 77, "decode-0", 20, 0, 30.0, (KvEndpoint("tcp", "127.0.0.1:1"),))
        error = _fail(rig, nowhere)

        assert isinstance(error, InstanceLost)
        assert "127.0.0.1:1" in str(error)


def _connect(rig: Rig, transport: str) -> socket.socket:
    endpoint = endpoint_of(rig, transport)
    if transport == "shm":
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(DEADLINE_S)
        sock.connect("\0" + endpoint.address)
        return sock
    host, _, port = endpoint.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


@pytest.mark.parametrize("transport", EVERY_TRANSPORT)
@pytest.mark.parametrize(
    "garbage",
    [
        pickle.dumps({"block": list(range(100))}),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(64),
        PREFIX.pack(MAGIC, PROTOCOL_VERSION, 99, 0, 0),
        PREFIX.pack(MAGIC, PROTOCOL_VERSION, MessageType.FRAME, 0, 0),
        PREFIX.pack(MAGIC, PROTOCOL_VERSION, MessageType.HELLO, 0, 2**32 - 1),
        PREFIX.pack(MAGIC, PROTOCOL_VERSION, MessageType.HELLO, 0, 40) + bytes(range(40)),
    ],
)
def test_garbage_on_the_listening_port_is_cut_and_counted(transport: str, garbage: bytes) -> None:
    with make_rig(transport) as rig, contextlib.closing(_connect(rig, transport)) as sock:
        sock.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):
                pass

        until(lambda: rig.receiver.counts.refused_connections == 1)
        ticket = rig.open(20, BLOCKS)
        rig.hand_over(ticket, BLOCKS)
        rig.events.wait("acked", ticket.ticket_id)


@pytest.mark.parametrize("transport", EVERY_TRANSPORT)
def test_a_length_over_the_limit_cuts_the_link_without_allocating(transport: str) -> None:
    with make_rig(transport) as rig:
        ticket, raw = rig.open(20, BLOCKS), RawSender(rig)
        raw.say(Open(ticket.ticket_id, ticket.epoch, 20, 0))

        raw.stream.send([PREFIX.pack(MAGIC, PROTOCOL_VERSION, MessageType.COMMIT, 0, 2**32 - 1)])
        rig.events.wait("ended", ticket.ticket_id)

        assert "COMMIT has 4294967295 bytes, but the limit is" in rig.events.ends[ticket.ticket_id][1]
        until(lambda: rig.receiver.counts.refused_connections == 1)
        raw.stream.close()


def test_a_dropped_frame_with_an_absurd_payload_cuts_the_tcp_link() -> None:
    with make_rig("tcp") as rig:
        tokens = fill(rig.p_pool, range(5), 20)
        ticket, raw = rig.open(20, BLOCKS), RawSender(rig)
        frame, payload = raw.frame(ticket, 0, 0, tokens, num_bytes=2**63)

        raw.say(Open(ticket.ticket_id, ticket.epoch, 20, 0))
        raw.announce(frame, payload)
        rig.events.wait("ended", ticket.ticket_id)
        until(lambda: rig.receiver.counts.refused_connections == 1)

        assert f"{2**63} bytes" in rig.events.ends[ticket.ticket_id][1]
        assert MAX_FRAME_BYTES < 2**63
        raw.stream.close()


def test_shm_blocks_outside_the_senders_pool_end_the_ticket() -> None:
    with make_rig("shm", num_blocks=8) as rig:
        tokens = fill(rig.p_pool, range(5), 20)
        ticket, raw = rig.open(20, BLOCKS), RawSender(rig)
        frame, payload = raw.frame(ticket, 0, 0, tokens)
        outside = type(frame)(**{n: getattr(frame, n) for n in frame.__slots__} | {"block_ids": (0, 1, 2, 3, 8)})

        raw.say(Open(ticket.ticket_id, ticket.epoch, 20, 0))
        raw.announce(outside, payload)
        rig.events.wait("ended", ticket.ticket_id)

        assert "block 8 is outside the pool of 8 blocks" in rig.events.ends[ticket.ticket_id][1]
        raw.stream.close()


def test_a_stalled_tcp_sender_cannot_hold_aborted_blocks() -> None:
    with make_rig("tcp") as rig:
        tokens = fill(rig.p_pool, range(5), 20)
        ticket, other, raw = rig.open(20, BLOCKS), rig.open(20, (10, 11, 12, 13, 14)), RawSender(rig)
        frame, payload = raw.frame(ticket, 0, 0, tokens)
        raw.say(Open(ticket.ticket_id, ticket.epoch, 20, 0))
        raw.say(Open(other.ticket_id, other.epoch, 20, 0))
        header, body = TcpOutlet().announce(frame, RegionRuns(Region(payload), 0, whole(len(payload))))
        raw.stream.send([header, body[:100]])
        until(lambda: bytes(rig.d_pool.buffer[256:356]) == payload[:100])

        rig.receiver.abort(ticket.ticket_id, "cancelled")
        rig.events.wait("ended", ticket.ticket_id)
        before = bytes(rig.d_pool.buffer)
        raw.stream.send([body[100:]])
        raw.announce(*raw.frame(other, 0, 5, tokens))
        until(lambda: rig.receiver.bytes_received == len(payload))

        changed = before != bytes(rig.d_pool.buffer)
        assert changed
        assert bytes(rig.d_pool.buffer[: rig.d_pool.layout.offsets[5]]) == before[: rig.d_pool.layout.offsets[5]]
        raw.stream.close()


@pytest.mark.parametrize("transport", EVERY_TRANSPORT)
def test_a_peer_stalled_in_a_message_loses_only_its_own_tickets(transport: str) -> None:
    with make_rig(transport) as rig:
        stalled, other, raw = rig.open(20, BLOCKS), rig.open(20, (10, 11, 12, 13, 14)), RawSender(rig)
        (incoming,) = rig.receiver._links.values()
        incoming._stream._timeout_s = 0.3  # of this link alone, once it is made
        raw.say(Open(stalled.ticket_id, stalled.epoch, 20, 0))

        raw.stream.send([PREFIX.pack(MAGIC, PROTOCOL_VERSION, MessageType.COMMIT, 0, 100), b"x"])
        rig.events.wait("ended", stalled.ticket_id)
        rig.hand_over(other, (0, 1, 2, 3, 4))
        rig.events.wait("acked", other.ticket_id)

        assert "the peer sent nothing for 0.3 s" in rig.events.ends[stalled.ticket_id][1]
        assert rig.events.count("ended") == 1
        raw.stream.close()


def test_a_receiver_that_never_answers_the_handshake_fails_the_ticket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_server, make_rig("tcp", progress_timeout_s=0.3) as rig:
        ticket = rig.open(20, BLOCKS)
        address = f"127.0.0.1:{silent_server.getsockname()[1]}"
        error = _fail(rig, Ticket(ticket.ticket_id, 77, "decode-0", 20, 0, 30.0, (KvEndpoint("tcp", address),)))

        assert "nothing was received for 0.3 s" in str(error)


def test_a_port_range_is_kept_and_a_full_one_is_refused_with_its_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, make_rig("tcp") as rig:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"no port of {port}-{port} on 127.0.0.1"):
            KvReceiver(
                rig.d_pool, instance_id="d", epoch=1, host="127.0.0.1", transports=("tcp",), events=rig.events,
                port_range=(port, port),
            )  # fmt: skip


@pytest.mark.parametrize("transport", EVERY_TRANSPORT)
def test_closing_leaves_no_thread_behind(transport: str) -> None:
    before = set(threading.enumerate())
    with make_rig(transport) as rig:
        ticket = rig.open(20, BLOCKS)
        rig.hand_over(ticket, BLOCKS)
        rig.events.wait("acked", ticket.ticket_id)

    until(lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith("kv-")])


def test_a_hello_with_an_absurd_pool_is_refused() -> None:
    with make_rig("tcp") as rig:
        hello = Hello(PROTOCOL_VERSION, "raw", 5, 1, "decode-0", 77, "tcp", 2**31, 2**63, TENSORS)
        stream = Stream(_connect(rig, "tcp"), progress_timeout_s=DEADLINE_S)

        stream.send([encode_hello(hello)])
        expect(stream, MessageType.CHALLENGE, timeout_s=DEADLINE_S)
        stream.send([encode_proof(no_proof(Trust()))])
        kind, _ = stream.receive_message(first_byte_s=DEADLINE_S)

        assert kind is MessageType.REFUSE
        stream.close()


@pytest.mark.parametrize("error", [OSError("reset already"), RuntimeError("can't start new thread")])
def test_a_failed_accept_keeps_the_listener_open(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = threading.Event()

    def fail(sock: socket.socket, progress_timeout_s: float) -> None:
        broken.set()
        raise error

    with make_rig("tcp") as rig:
        with monkeypatch.context() as patch:
            patch.setattr("kvtransfer.receiver.tcp.tune", fail)
            with _connect(rig, "tcp") as refused:
                assert broken.wait(DEADLINE_S)
                refused.settimeout(DEADLINE_S)
                assert refused.recv(1) == b""
        ticket = rig.open(20, BLOCKS)
        rig.hand_over(ticket, BLOCKS)

        rig.events.wait("acked", ticket.ticket_id)


@pytest.mark.parametrize("transport", EVERY_TRANSPORT)
def test_an_owner_that_raises_on_a_finish_costs_no_connection(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_rig(transport) as rig:
        tickets, raw = [rig.open(4, (i,)) for i in range(3)], RawSender(rig)
        for ticket in tickets:
            raw.say(Open(ticket.ticket_id, ticket.epoch, 4, 0))
        raw.say(Renew(tickets[2].ticket_id, tickets[2].epoch))
        until(lambda: rig.receiver.counts.renewals == 1)
        ended = rig.events.ended

        def break_once(ticket_id: str, block_ids: tuple[int, ...], reason: str) -> None:
            monkeypatch.undo()
            ended(ticket_id, block_ids, reason)
            raise RuntimeError("a defect of the owner")

        monkeypatch.setattr(rig.events, "ended", break_once)
        raw.stream.close()
        for ticket in tickets:
            rig.events.wait("ended", ticket.ticket_id)

        until(lambda: not rig.receiver._links)


def test_no_ticket_is_made_once_the_receiver_is_closed() -> None:
    with make_rig("tcp") as rig:
        before = rig.open(4, (1,))
        rig.receiver.close()

        with pytest.raises(Unavailable, match="no more tickets are opened: the receiver is shutting down"):
            rig.open(4, (2,))

        assert rig.events.reports == [("ended", before.ticket_id)]
        assert not rig.receiver._table._tickets


@pytest.mark.parametrize("ending", ["abort", "close"])
def test_a_ticket_that_ends_while_it_is_made_leaves_no_share_behind(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_rig("tcp") as rig:
        table, ticket_id = rig.receiver._table, secrets.token_hex(16)
        reserve = table.reserve

        def end_first(ticket_id: str, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> None:
            if ending == "abort":
                rig.receiver.abort(ticket_id, "cancelled")
            else:
                rig.receiver.close()
            reserve(ticket_id, num_tokens, first_token, block_ids)

        monkeypatch.setattr(table, "reserve", end_first)
        rig.receiver.open(ticket_id, num_tokens=4, first_token=0, block_ids=(3,))

        assert rig.events.reports == [("ended", ticket_id)]
        assert rig.events.ends[ticket_id][0] == (3,)
        assert not table._tickets
        quorum = rig.receiver._quorum
        assert isinstance(quorum, Quorum)
        assert not quorum._entries


def test_a_defect_before_a_move_does_not_hold_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_rig("tcp") as rig:
        tokens, ticket, raw = fill(rig.p_pool, range(5), 20), rig.open(20, BLOCKS), RawSender(rig)

        def fail(*given: object) -> None:
            raise RuntimeError("a defect of the windows")

        monkeypatch.setattr("kvtransfer.slots.Windows.of", fail)
        raw.say(Open(ticket.ticket_id, ticket.epoch, 20, 0))
        raw.announce(*raw.frame(ticket, 0, 0, tokens))

        rig.events.wait("ended", ticket.ticket_id)
        assert not rig.receiver._table._tickets
        raw.stream.close()


@pytest.mark.parametrize("transport", EVERY_TRANSPORT)
def test_a_defect_while_a_link_ends_leaves_nothing_open(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_rig(transport) as rig:
        raw, closed = RawSender(rig), threading.Event()
        until(lambda: bool(rig.receiver._table._sources))
        (incoming,) = rig.receiver._links.values()
        assert incoming._inlet is not None
        close = incoming._inlet.close

        def fail(link: int, reason: str) -> None:
            raise RuntimeError("a defect of the table")

        def note() -> None:
            close()
            closed.set()
            raise RuntimeError("a defect of the inlet")

        monkeypatch.setattr(rig.receiver._table, "lost", fail)
        monkeypatch.setattr(incoming._inlet, "close", note)
        raw.stream.close()
        incoming.thread.join(DEADLINE_S)

        assert closed.is_set()
        assert incoming._stream.socket.fileno() == -1
        assert not rig.receiver._links
