"""What every transport does: the whole hand-off, every finish of it, and its refusals. Real sockets, two pools."""

import itertools
import random
import re
import threading
from collections.abc import Iterator

import pytest

from kvtransfer import shm
from kvtransfer.link_messages import Abort, Ack, Commit, Nack, Open
from kvtransfer.named_windows import WindowNamer
from kvtransfer.receiver import KvReceiver
from kvtransfer.terms import seal_of
from kvtransfer.ticket import ReceiverTicket
from kvtransfer.ticket_table import TicketTable
from tests.kvtransfer.every_transport import EVERY_TRANSPORT
from tests.kvtransfer.rig import DEADLINE_S, TENSORS, RawSender, Rig, fill, make_rig, read, until
from wire.errors import HandoffFailed, InstanceLost, NoCapacity

P_BLOCKS = (3, 9, 4, 5, 20, 1)
D_BLOCKS = (7, 8, 30, 2, 11, 50)


@pytest.fixture(params=EVERY_TRANSPORT)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rig(transport: str) -> Iterator[Rig]:
    with make_rig(transport) as made:
        yield made


def test_a_whole_hand_off_is_byte_exact_and_acked(rig: Rig, transport: str) -> None:
    tokens = fill(rig.p_pool, P_BLOCKS, 22)
    ticket = rig.open(22, D_BLOCKS)

    rig.hand_over(ticket, P_BLOCKS, b"the prompt")
    rig.events.wait("acked", ticket.ticket_id)

    kv_bytes = 22 * rig.p_pool.layout.token_bytes
    assert read(rig.d_pool, D_BLOCKS, 22) == tokens
    assert rig.events.commits[ticket.ticket_id] == (b"the prompt", D_BLOCKS, kv_bytes)
    assert rig.events.acks[ticket.ticket_id].kv_bytes == kv_bytes
    assert rig.events.acks[ticket.ticket_id].transport == transport
    assert rig.receiver.bytes_received == rig.sender.bytes_sent == kv_bytes
    assert [(link.state, link.transport, link.failures) for link in rig.sender.links()] == [("up", transport, 0)]


@pytest.mark.parametrize(("sender_block", "receiver_block"), [(4, 16), (16, 4), (6, 4)])
def test_block_sizes_may_differ(transport: str, sender_block: int, receiver_block: int) -> None:
    with make_rig(transport, sender_block=sender_block, receiver_block=receiver_block) as rig:
        tokens = fill(rig.p_pool, P_BLOCKS, 23)
        ticket = rig.open(23, D_BLOCKS)

        rig.hand_over(ticket, P_BLOCKS)
        rig.events.wait("acked", ticket.ticket_id)

        assert read(rig.d_pool, D_BLOCKS, 23) == tokens


def test_chunks_and_layers_may_come_in_any_order(rig: Rig) -> None:
    tokens = fill(rig.p_pool, P_BLOCKS, 24)
    ticket = rig.open(24, D_BLOCKS)
    chunks = [(0, 1), (1, 7), (7, 16), (16, 24)]
    pieces = [(layer, *chunk) for layer, chunk in itertools.product(range(3), chunks)]
    random.Random(1).shuffle(pieces)

    rig.sender.begin(ticket)
    for layer, start, end in pieces:
        rig.sender.put(ticket.ticket_id, layer, start, end, P_BLOCKS)
    rig.sender.commit(ticket.ticket_id, b"")
    rig.events.wait("acked", ticket.ticket_id)

    assert read(rig.d_pool, D_BLOCKS, 24) == tokens


def test_only_tokens_from_the_requested_first_one_are_sent(rig: Rig) -> None:
    tokens = fill(rig.p_pool, P_BLOCKS, 20)
    before = read(rig.d_pool, D_BLOCKS, 8)
    ticket = rig.open(20, D_BLOCKS, first_token=8)

    rig.hand_over(ticket, P_BLOCKS)
    rig.events.wait("acked", ticket.ticket_id)

    after = read(rig.d_pool, D_BLOCKS, 20)
    size = TENSORS[0].token_bytes
    assert all(after[i][: 8 * size] == before[i] and after[i][8 * size :] == tokens[i][8 * size :] for i in tokens)
    assert rig.sender.bytes_sent == 12 * rig.p_pool.layout.token_bytes


def test_a_fully_cached_prompt_needs_only_the_commit(rig: Rig) -> None:
    ticket = rig.open(8, D_BLOCKS, first_token=8)

    rig.hand_over(ticket, P_BLOCKS)
    rig.events.wait("acked", ticket.ticket_id)

    assert rig.sender.bytes_sent == 0


def test_begin_put_and_commit_are_idempotent(rig: Rig) -> None:
    tokens = fill(rig.p_pool, P_BLOCKS, 20)
    ticket = rig.open(20, D_BLOCKS)

    for _ in range(2):
        rig.sender.begin(ticket)
        rig.put_all(ticket, P_BLOCKS)
    rig.sender.commit(ticket.ticket_id, b"x")
    rig.sender.commit(ticket.ticket_id, b"x")
    rig.events.wait("acked", ticket.ticket_id)

    assert read(rig.d_pool, D_BLOCKS, 20) == tokens
    assert rig.sender.bytes_sent == 20 * rig.p_pool.layout.token_bytes


def test_two_tickets_at_once_do_not_mix(rig: Rig) -> None:
    first, second = fill(rig.p_pool, (0, 1), 8, seed=1), fill(rig.p_pool, (2, 3), 8, seed=2)
    one, two = rig.open(8, (10, 11)), rig.open(8, (20, 21))

    rig.sender.begin(one)
    rig.sender.begin(two)
    for layer in range(3):
        rig.sender.put(one.ticket_id, layer, 0, 8, (0, 1))
        rig.sender.put(two.ticket_id, layer, 0, 8, (2, 3))
    rig.sender.commit(two.ticket_id, b"2")
    rig.sender.commit(one.ticket_id, b"1")
    for ticket in (one, two):
        rig.events.wait("acked", ticket.ticket_id)

    assert read(rig.d_pool, (10, 11), 8) == first
    assert read(rig.d_pool, (20, 21), 8) == second


def test_windows_are_named_across_the_wrap_of_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    namer = WindowNamer()
    namer._last = 2**32 - 100
    monkeypatch.setattr(shm, "WindowNamer", lambda: namer)
    with make_rig("shm") as rig:
        tokens = fill(rig.p_pool, P_BLOCKS, 21)
        for turn in range(200):
            blocks = D_BLOCKS if turn % 2 else tuple(reversed(D_BLOCKS))
            ticket = rig.open(21, blocks)
            rig.hand_over(ticket, (*P_BLOCKS,))  # a new tuple is a new window
            rig.events.wait("acked", ticket.ticket_id)
            assert read(rig.d_pool, blocks, 21) == tokens
        assert len(rig.sender.links()) == 1
    assert 90 < namer._last < 1_000


def test_sixty_four_tickets_at_once_all_arrive(transport: str) -> None:
    with make_rig(transport, num_blocks=256) as rig:
        tokens = [fill(rig.p_pool, range(4 * i, 4 * i + 4), 15, seed=i) for i in range(64)]
        tickets = [rig.open(15, range(252 - 4 * i, 256 - 4 * i)) for i in range(64)]
        for ticket in tickets:
            rig.sender.begin(ticket)
        for layer in range(3):
            for i, ticket in enumerate(tickets):
                rig.sender.put(ticket.ticket_id, layer, 0, 15, range(4 * i, 4 * i + 4))
        for ticket in tickets:
            rig.sender.commit(ticket.ticket_id, b"")
        for ticket in tickets:
            rig.events.wait("acked", ticket.ticket_id)

        assert all(read(rig.d_pool, range(252 - 4 * i, 256 - 4 * i), 15) == tokens[i] for i in range(64))
        assert len(rig.sender.links()) == 1


def test_a_corrupt_frame_is_resent_once_and_arrives(transport: str) -> None:
    with make_rig(transport, failpoints="kv.send.mid=corrupt@3") as rig:
        tokens = fill(rig.p_pool, P_BLOCKS, 20)
        ticket = rig.open(20, D_BLOCKS)

        rig.hand_over(ticket, P_BLOCKS)
        rig.events.wait("acked", ticket.ticket_id)

        assert read(rig.d_pool, D_BLOCKS, 20) == tokens
        assert rig.events.acks[ticket.ticket_id].resent_frames == 1
        assert rig.receiver.counts.corrupt_frames == 1


def test_a_frame_corrupt_twice_ends_the_ticket_with_a_reason(transport: str) -> None:
    with make_rig(transport, failpoints="kv.send.mid=corrupt") as rig:
        ticket = rig.open(20, D_BLOCKS)

        rig.hand_over(ticket, P_BLOCKS)
        rig.events.wait("failed", ticket.ticket_id)
        rig.events.wait("ended", ticket.ticket_id)

        assert isinstance(rig.events.failures[ticket.ticket_id], HandoffFailed)
        assert "corrupt twice" in str(rig.events.failures[ticket.ticket_id])
        assert rig.events.ends[ticket.ticket_id][0] == D_BLOCKS
        assert "committed" not in [kind for kind, _ in rig.events.reports]


def test_blocks_that_change_during_the_hand_off_never_commit(rig: Rig) -> None:
    tokens = fill(rig.p_pool, range(5), 20)
    ticket, raw = rig.open(20, D_BLOCKS), RawSender(rig)
    frame, payload = raw.frame(ticket, 0, 0, tokens)

    raw.say(Open(ticket.ticket_id, ticket.epoch, 20, 0))
    fill(rig.p_pool, range(5), 20, seed=9)
    raw.announce(frame, bytes(len(payload)))

    assert raw.receive() == Nack(ticket.ticket_id, ticket.epoch, 0)
    raw.stream.close()


def test_a_duplicate_frame_is_dropped_and_counted(rig: Rig) -> None:
    tokens = fill(rig.p_pool, range(5), 20)
    ticket, raw = rig.open(20, D_BLOCKS), RawSender(rig)
    frames = [raw.frame(ticket, tensor, tensor, tokens) for tensor in range(6)]

    raw.say(Open(ticket.ticket_id, ticket.epoch, 20, 0))
    for frame, payload in [*frames, frames[2]]:
        raw.announce(frame, payload)
    total = sum(seal_of(frame) for frame, _ in frames) % 2**64
    raw.say(Commit(ticket.ticket_id, ticket.epoch, 6, 6 * len(tokens[0]), total, 0x2D06800538D394C2, b""))

    assert raw.receive() == Ack(ticket.ticket_id, ticket.epoch)
    assert read(rig.d_pool, D_BLOCKS, 20) == tokens
    assert rig.receiver.counts.duplicate_frames == 1
    raw.stream.close()


def test_a_repeated_commit_is_acked_again_and_reported_once(rig: Rig) -> None:
    ticket, raw = rig.open(4, D_BLOCKS, first_token=4), RawSender(rig)
    commit = Commit(ticket.ticket_id, ticket.epoch, 0, 0, 0, 0x2D06800538D394C2, b"")

    raw.say(Open(ticket.ticket_id, ticket.epoch, 4, 4))
    raw.say(commit)
    raw.say(commit)

    assert raw.receive() == raw.receive() == Ack(ticket.ticket_id, ticket.epoch)
    assert rig.events.count("committed") == 1
    raw.stream.close()


@pytest.mark.parametrize("message", [Open, Commit])
def test_a_late_message_gets_the_tickets_reason(rig: Rig, message: type[Open | Commit]) -> None:
    ticket, raw = rig.open(4, D_BLOCKS, first_token=4), RawSender(rig)
    rest = (4, 4) if message is Open else (0, 0, 0, 0x2D06800538D394C2, b"")

    rig.receiver.abort(ticket.ticket_id, "the client went away")
    rig.events.wait("ended", ticket.ticket_id)
    raw.say(message(ticket.ticket_id, ticket.epoch, *rest))

    answer = raw.receive()
    assert isinstance(answer, Abort)
    assert answer.reason == f"ticket {ticket.ticket_id} has ended: the client went away"
    raw.stream.close()


def test_a_message_during_the_tickets_end_gets_the_reason(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket, raw = rig.open(4, D_BLOCKS, first_token=4), RawSender(rig)
    ends, resume, release = threading.Event(), threading.Event(), TicketTable._release

    def held_up(self: TicketTable, one: ReceiverTicket) -> None:
        if threading.current_thread() is aborting:
            ends.set()
            assert resume.wait(DEADLINE_S)
        release(self, one)

    monkeypatch.setattr(TicketTable, "_release", held_up)
    aborting = threading.Thread(target=rig.receiver.abort, args=(ticket.ticket_id, "the client went away"))
    aborting.start()
    assert ends.wait(DEADLINE_S)
    raw.say(Open(ticket.ticket_id, ticket.epoch, 4, 4))
    answer = raw.receive()
    resume.set()
    aborting.join(DEADLINE_S)

    assert isinstance(answer, Abort)
    assert answer.reason.endswith("cannot be opened here by raw of epoch 5, rank 0 of 1: the client went away")
    raw.stream.close()


@pytest.mark.parametrize("what", ["late", "unknown", "foreign epoch", "not opened"])
def test_an_unauthorised_frame_never_touches_memory(rig: Rig, what: str) -> None:
    tokens = fill(rig.p_pool, range(5), 20)
    ticket, raw = rig.open(20, D_BLOCKS), RawSender(rig)
    frame, payload = raw.frame(ticket, 0, 0, tokens, epoch=76 if what == "foreign epoch" else 77)
    if what == "unknown":
        frame = type(frame)(**{name: getattr(frame, name) for name in frame.__slots__} | {"ticket_id": "ab" * 16})
    if what != "not opened":
        raw.say(Open(ticket.ticket_id, ticket.epoch, 20, 0))
    if what == "late":
        raw.say(Abort(ticket.ticket_id, ticket.epoch, "Cancelled", "changed my mind"))
        rig.events.wait("ended", ticket.ticket_id)

    before = bytes(rig.d_pool.buffer)
    raw.announce(frame, payload)
    until(lambda: rig.receiver.counts.dropped_frames == 1)

    assert bytes(rig.d_pool.buffer) == before
    raw.stream.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor": 6}, "not among the 6 KV tensors"),
        ({"layer": 2}, "not among the 6 KV tensors"),
        ({"end": 21}, r"outside the expected tokens \[0, 20\)"),
        ({"start": 20}, r"outside the expected tokens \[0, 20\)"),
        ({"head_end": 1}, r"heads \[0, 1\) sent, \[0, 2\) expected"),
        ({"num_bytes": 4}, "has 4 bytes, expected 1280"),
    ],
)
def test_a_frame_that_breaks_the_tickets_terms_ends_it_with_a_reason(
    rig: Rig, changes: dict[str, int], words: str
) -> None:
    tokens = fill(rig.p_pool, range(5), 20)
    ticket, raw = rig.open(20, D_BLOCKS), RawSender(rig)
    frame, payload = raw.frame(ticket, 0, 0, tokens, **changes)
    before = bytes(rig.d_pool.buffer)

    raw.say(Open(ticket.ticket_id, ticket.epoch, 20, 0))
    raw.announce(frame, payload[: frame.num_bytes])
    answer = raw.receive()

    assert isinstance(answer, Abort)
    assert answer.error == "HandoffFailed"
    assert re.search(words, answer.reason)
    assert bytes(rig.d_pool.buffer) == before
    rig.events.wait("ended", ticket.ticket_id)
    raw.stream.close()


def test_another_link_cannot_act_for_a_ticket(rig: Rig) -> None:
    tokens = fill(rig.p_pool, range(5), 20)
    ticket, owner, other = rig.open(20, D_BLOCKS), RawSender(rig), RawSender(rig, link_epoch=10)

    owner.say(Open(ticket.ticket_id, ticket.epoch, 20, 0))
    owner.say(Commit(ticket.ticket_id, 1, 0, 0, 0, 0, b""))
    assert isinstance(owner.receive(), Abort)
    other.say(Open(ticket.ticket_id, ticket.epoch, 20, 0))
    assert isinstance(other.receive(), Abort)
    other.announce(*other.frame(ticket, 0, 0, tokens))
    until(lambda: rig.receiver.counts.dropped_frames == 1)
    other.stream.close()

    owner.announce(*owner.frame(ticket, 0, 0, tokens))
    until(lambda: rig.receiver.bytes_received == len(tokens[0]))
    assert rig.events.count("ended") == 0
    owner.stream.close()


def test_a_sender_that_dies_ends_its_tickets_at_once(rig: Rig) -> None:
    tokens = fill(rig.p_pool, range(5), 20)
    ticket, other_ticket = rig.open(20, D_BLOCKS), rig.open(4, (40,))
    raw = RawSender(rig)

    raw.say(Open(ticket.ticket_id, ticket.epoch, 20, 0))
    raw.announce(*raw.frame(ticket, 0, 0, tokens))
    raw.stream.close()
    rig.events.wait("ended", ticket.ticket_id)

    assert rig.events.ends[ticket.ticket_id][0] == D_BLOCKS
    assert ("ended", other_ticket.ticket_id) not in rig.events.reports


def test_a_closed_receiver_fails_its_senders_tickets(rig: Rig) -> None:
    ticket = rig.open(20, D_BLOCKS)
    rig.sender.begin(ticket)
    rig.put_all(ticket, P_BLOCKS, 0, 8)
    until(lambda: rig.receiver.bytes_received > 0)
    first_epoch = rig.sender.links()[0].epoch

    rig.receiver.close()
    rig.events.wait("failed", ticket.ticket_id)
    until(lambda: rig.sender.links()[0].state == "down")
    rig.sender.begin(ticket)
    until(lambda: rig.events.count("failed") == 2)

    assert isinstance(rig.events.failures[ticket.ticket_id], InstanceLost)
    assert rig.sender.links()[0].epoch > first_epoch
    assert rig.events.ends[ticket.ticket_id][1] == "the receiver is shutting down"


def test_every_ticket_begun_while_a_link_goes_down_ends_exactly_once(transport: str) -> None:
    with make_rig(transport, num_blocks=256) as rig:
        tickets = [rig.open(4, (block,)) for block in range(200)]
        closing = threading.Thread(target=rig.receiver.close)

        for number, ticket in enumerate(tickets):
            rig.hand_over(ticket, (number,))
            if number == 60:
                closing.start()
        closing.join(DEADLINE_S)
        until(lambda: rig.events.count("acked") + rig.events.count("failed") >= 200)

        endings = [ticket_id for kind, ticket_id in rig.events.reports if kind in ("acked", "failed")]
        assert sorted(endings) == sorted(ticket.ticket_id for ticket in tickets)
        assert rig.events.count("committed") + rig.events.count("ended") == 200


def test_a_senders_abort_ends_the_receivers_half_silently(rig: Rig) -> None:
    ticket = rig.open(20, D_BLOCKS)
    rig.sender.begin(ticket)
    rig.put_all(ticket, P_BLOCKS, 0, 8)

    rig.sender.abort(ticket.ticket_id, "the client went away")
    rig.sender.abort(ticket.ticket_id, "again")
    rig.sender.put(ticket.ticket_id, 0, 8, 12, P_BLOCKS)
    rig.events.wait("ended", ticket.ticket_id)

    assert rig.events.ends[ticket.ticket_id] == (D_BLOCKS, "the client went away")
    assert [kind for kind, _ in rig.events.reports] == ["ended"]


def test_an_abort_by_the_receiver_reaches_the_sender(rig: Rig) -> None:
    ticket = rig.open(20, D_BLOCKS)
    rig.sender.begin(ticket)
    rig.put_all(ticket, P_BLOCKS, 0, 8)
    until(lambda: rig.receiver.bytes_received > 0)

    rig.receiver.abort(ticket.ticket_id, "cancelled here")
    rig.receiver.abort(ticket.ticket_id, "again")
    rig.events.wait("failed", ticket.ticket_id)
    rig.events.wait("ended", ticket.ticket_id)

    assert str(rig.events.failures[ticket.ticket_id]) == "cancelled here"
    assert sorted(kind for kind, _ in rig.events.reports) == ["ended", "failed"]


@pytest.mark.parametrize("refusal", [NoCapacity("no room: 3 sequences, 2 free"), RuntimeError("a defect")])
def test_a_refused_commit_reaches_the_sender_and_frees_the_blocks(rig: Rig, refusal: Exception) -> None:
    rig.events.refusal = refusal
    ticket = rig.open(20, D_BLOCKS)

    rig.hand_over(ticket, P_BLOCKS)
    rig.events.wait("failed", ticket.ticket_id)
    rig.events.wait("ended", ticket.ticket_id)

    assert str(refusal) in str(rig.events.failures[ticket.ticket_id])
    if isinstance(refusal, NoCapacity):
        assert type(rig.events.failures[ticket.ticket_id]) is NoCapacity
    assert rig.events.count("committed") == 0


def test_an_expired_ticket_is_released_and_reported_to_its_sender(transport: str) -> None:
    with make_rig(transport, lease_s=8.0) as rig:
        ticket, idle = rig.open(20, D_BLOCKS), rig.open(4, (40,))
        rig.progress_age = 60.0
        rig.sender.begin(ticket)
        rig.put_all(ticket, P_BLOCKS, 0, 8)
        until(lambda: rig.receiver.bytes_received == 8 * rig.p_pool.layout.token_bytes)
        until(lambda: not rig.receiver._table._arrivals._seen)  # what still arrives is alive, whatever the clock says

        rig.receiver.sweep(rig.clock.now + 7.9)
        assert rig.events.count("ended") == 0
        rig.receiver.sweep(rig.clock.now + 8.0)
        rig.events.wait("failed", ticket.ticket_id)
        rig.events.wait("ended", ticket.ticket_id)

        assert "lease of 8 s" in rig.events.ends[ticket.ticket_id][1]
        assert "lease of 8 s" in rig.events.ends[idle.ticket_id][1]
        assert rig.events.count("ended") == 2


def test_a_sender_renews_only_while_its_engine_makes_progress(transport: str) -> None:
    with make_rig(transport, lease_s=9.0) as rig:
        ticket = rig.open(20, D_BLOCKS)
        rig.sender.begin(ticket)
        rig.put_all(ticket, P_BLOCKS, 0, 8)
        until(lambda: rig.receiver.bytes_received > 0)
        for renewals in range(1, 5):
            rig.clock.now += 4.0
            rig.sender.sweep()
            until(lambda wanted=renewals: rig.receiver.counts.renewals >= wanted)  # type: ignore[misc]
            rig.receiver.sweep()
        assert rig.events.reports == []

        rig.progress_age = 5.0
        rig.clock.now += 40.0
        rig.sender.sweep()
        rig.events.wait("failed", ticket.ticket_id)
        rig.events.wait("ended", ticket.ticket_id)

        assert rig.events.count("failed") == rig.events.count("ended") == 1


def test_a_commit_before_all_tokens_fails_with_the_missing_ones(rig: Rig) -> None:
    ticket = rig.open(20, D_BLOCKS)
    rig.sender.begin(ticket)
    rig.put_all(ticket, P_BLOCKS, 0, 12)

    rig.sender.commit(ticket.ticket_id, b"")
    rig.events.wait("failed", ticket.ticket_id)
    rig.events.wait("ended", ticket.ticket_id)

    assert "tokens [12, 20) of layer 0 k were never put" in str(rig.events.failures[ticket.ticket_id])


def test_a_lost_ack_fails_only_the_sender(transport: str) -> None:
    with make_rig(transport, failpoints="kv.before_ack=raise@1") as rig:
        ticket = rig.open(8, (0, 1))

        rig.hand_over(ticket, (0, 1))
        rig.events.wait("failed", ticket.ticket_id)

        assert isinstance(rig.events.failures[ticket.ticket_id], InstanceLost)
        assert [kind for kind, _ in rig.events.reports] == ["committed", "failed"]


def test_links_to_an_older_process_close_after_its_tickets(rig: Rig, transport: str) -> None:
    old = rig.open(20, D_BLOCKS)
    rig.sender.begin(old)
    rig.put_all(old, P_BLOCKS, 0, 8)
    until(lambda: rig.receiver.bytes_received > 0)
    restarted = KvReceiver(
        rig.d_pool, instance_id="decode-0", epoch=78, host="127.0.0.1", transports=(transport,), events=rig.events
    )

    new = restarted.open("cd" * 16, num_tokens=8, first_token=0, block_ids=(40, 41))
    rig.hand_over(new, (30, 31))
    rig.events.wait("acked", new.ticket_id)
    rig.put_all(old, P_BLOCKS)
    rig.sender.commit(old.ticket_id, b"")
    rig.events.wait("acked", old.ticket_id)
    until(lambda: len(rig.sender.links()) == 1)

    assert [link.state for link in rig.sender.links()] == ["up"]
    assert rig.sender.bytes_sent == 28 * rig.p_pool.layout.token_bytes
    restarted.close()


def test_a_closed_sender_is_silent(rig: Rig) -> None:
    begun, later = rig.open(8, (0, 1)), rig.open(8, (2, 3))
    rig.sender.begin(begun)
    rig.put_all(begun, P_BLOCKS)

    rig.sender.close()
    rig.hand_over(later, P_BLOCKS)
    rig.events.wait("ended", begun.ticket_id)

    assert rig.events.ends[begun.ticket_id][1] == "the sender is shutting down"
    assert [kind for kind, _ in rig.events.reports] == ["ended"]


def test_a_raise_at_a_failpoint_ends_that_ticket_only(transport: str) -> None:
    with make_rig(transport, failpoints="kv.before_commit=raise@1") as rig:
        first, second = rig.open(8, (0, 1)), rig.open(8, (2, 3))

        rig.hand_over(first, (0, 1))
        rig.events.wait("failed", first.ticket_id)
        rig.hand_over(second, (2, 3))
        rig.events.wait("acked", second.ticket_id)

        assert "kv.before_commit" in str(rig.events.failures[first.ticket_id])
