"""P and D may differ in ranks and block size, layers in their tensors: each head of each token lands in its slot."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvtransfer.dial import dial
from kvtransfer.hello import Hello
from kvtransfer.link_codec import decode, encode
from kvtransfer.link_messages import Abort, Frame, Open
from kvtransfer.transport_interface import Timeouts
from kvtransfer.transport_table import make_transports
from tests.kvtransfer.every_transport import EVERY_TRANSPORT
from tests.kvtransfer.rank_rig import RankRig, make_rank_rig, random_kv
from tests.kvtransfer.rig import DEADLINE_S, until
from wire.errors import HandoffFailed, Incompatible, InstanceLost, NoCapacity
from wire.kv_layout import KvTensor
from wire.types import PROTOCOL_VERSION

RANKS, BLOCKS = (1, 2, 4), ((16, 16), (16, 128), (128, 16), (128, 128))
BLOCK_IDS = {16: (9, 3, 4, 5, 30, 1, 7, 12, 13, 20), 128: (2, 0)}
NUM_TOKENS = 150


def every_case() -> Iterator[object]:
    """All pairs of ranks, heads, block sizes and transports; by default those that differ in the most at once."""
    for number, case in enumerate(itertools.product(RANKS, RANKS, (4, 3, 1), BLOCKS, ("shm", "tcp"))):
        p_ranks, d_ranks, heads, (p_block, d_block), transport = case
        uneven = heads == 3 and p_block != d_block and transport == ("shm" if p_block == 16 else "tcp")
        few = p_ranks != d_ranks and number % 8 == 3
        yield pytest.param(*case, marks=() if uneven or few else pytest.mark.long)
    for one, ranks in itertools.product(EVERY_TRANSPORT, ((2, 4, 3), (4, 2, 3), (4, 1, 1), (1, 4, 4))):
        if one.values[0] not in ("shm", "tcp"):
            yield pytest.param(*ranks, (16, 128), *one.values, marks=[*one.marks, pytest.mark.long])


@pytest.mark.parametrize(("p_ranks", "d_ranks", "heads", "blocks", "transport"), [*every_case()])
def test_every_head_of_every_token_lands_in_its_slot(
    p_ranks: int, d_ranks: int, heads: int, blocks: tuple[int, int], transport: str
) -> None:
    p_block, d_block = blocks
    sizes = {"p_block": p_block, "d_block": d_block}
    with make_rank_rig(transport, p_ranks=p_ranks, d_ranks=d_ranks, heads=heads, **sizes) as rig:
        kv = random_kv(rig.tensors, NUM_TOKENS, seed=heads)
        rig.fill(kv, BLOCK_IDS[p_block])
        ticket = rig.open(NUM_TOKENS, BLOCK_IDS[d_block])

        rig.hand_over(ticket, BLOCK_IDS[p_block], description=b"the prompt")
        rig.events.wait("acked", ticket.ticket_id)

        rig.check(kv, BLOCK_IDS[d_block])
        num_bytes = NUM_TOKENS * sum(pool.layout.token_bytes for pool in rig.d_pools)
        assert rig.events.commits[ticket.ticket_id] == (b"the prompt", BLOCK_IDS[d_block], num_bytes)
        assert rig.events.acks[ticket.ticket_id].kv_bytes == num_bytes
        assert rig.events.acks[ticket.ticket_id].transport == transport
        assert rig.receiver.bytes_received == rig.sender.bytes_sent == num_bytes
        assert [kind for kind, _ in rig.events.reports] == ["committed", "acked"]


@pytest.fixture(params=["shm", "tcp"])
def rig(request: pytest.FixtureRequest) -> Iterator[RankRig]:
    with make_rank_rig(request.param, p_ranks=2, d_ranks=4, heads=3) as made:
        yield made


def settled(rig: RankRig) -> bool:
    """Whether no rank holds anything of any ticket any more."""
    return not any(receiver._table._tickets for receiver in rig.receivers) and settled_senders(rig)


def test_only_requested_kv_is_sent_and_links_show_as_one_peer(rig: RankRig) -> None:
    kv = random_kv(rig.tensors, 40)
    rig.fill(kv, range(3))
    ticket = rig.open(40, range(10, 13), first_token=16)

    rig.hand_over(ticket, range(3))
    rig.events.wait("acked", ticket.ticket_id)

    rig.check(kv, range(10, 13), first_token=16)
    assert rig.sender.bytes_sent == 24 * sum(pool.layout.token_bytes for pool in rig.d_pools)
    assert [(link.peer_id, link.state, link.failures) for link in rig.sender.links()] == [("decode-0", "up", 0)]


def test_tickets_in_both_orders_do_not_mix(rig: RankRig) -> None:
    kvs = [random_kv(rig.tensors, 30, seed=seed) for seed in range(6)]
    tickets = [rig.open(30, (2 * i, 2 * i + 1)) for i in range(6)]
    for i, kv in enumerate(kvs):
        rig.fill(kv, (2 * i + 12, 2 * i + 13))
        rig.sender.begin(tickets[i])
    for layer in (3, 1, 0):
        for i, ticket in enumerate(tickets):
            rig.sender.put(ticket.ticket_id, layer, 0, 30, (2 * i + 12, 2 * i + 13))
    for ticket in reversed(tickets):
        rig.sender.commit(ticket.ticket_id, b"")
    for ticket in tickets:
        rig.events.wait("acked", ticket.ticket_id)

    for i, kv in enumerate(kvs):
        rig.check(kv, (2 * i, 2 * i + 1))


def test_a_corrupt_frame_of_one_rank_is_resent_once() -> None:
    with make_rank_rig("tcp", p_ranks=4, d_ranks=2, failpoints="kv.send.mid=corrupt@5") as rig:
        kv = random_kv(rig.tensors, 30)
        rig.fill(kv, (1, 2))
        ticket = rig.open(30, (3, 4))

        rig.hand_over(ticket, (1, 2))
        rig.events.wait("acked", ticket.ticket_id)

        rig.check(kv, (3, 4))
        assert rig.events.acks[ticket.ticket_id].resent_frames == rig.receiver.counts.corrupt_frames == 1


def test_a_link_lost_between_two_ranks_ends_the_whole_ticket(rig: RankRig) -> None:
    ticket = rig.open(30, (3, 4))
    rig.sender.begin(ticket)
    rig.put_all(ticket, (1, 2))
    until(lambda: all(receiver.bytes_received > 0 for receiver in rig.receivers))

    victim = next(iter(rig.receivers[3]._links.values()))
    victim.shutdown()
    rig.events.wait("failed", ticket.ticket_id)
    rig.events.wait("ended", ticket.ticket_id)
    until(lambda: settled(rig))

    assert isinstance(rig.events.failures[ticket.ticket_id], InstanceLost | HandoffFailed)
    assert rig.events.ends[ticket.ticket_id][0] == (3, 4)
    assert sorted(kind for kind, _ in rig.events.reports) == ["ended", "failed"]


def test_an_abort_on_either_side_reaches_every_rank(rig: RankRig) -> None:
    ours, theirs = rig.open(30, (3, 4)), rig.open(30, (5, 6))
    for ticket in (ours, theirs):
        rig.sender.begin(ticket)
        rig.put_all(ticket, (1, 2), layers=1)
    until(lambda: all(receiver.bytes_received > 0 for receiver in rig.receivers))

    rig.sender.abort(ours.ticket_id, "the client went away")
    rig.receiver.abort(theirs.ticket_id, "cancelled here")
    rig.events.wait("ended", ours.ticket_id)
    rig.events.wait("ended", theirs.ticket_id)
    rig.events.wait("failed", theirs.ticket_id)
    until(lambda: settled(rig))

    assert rig.events.ends[ours.ticket_id] == ((3, 4), "the client went away")
    assert "cancelled here" in str(rig.events.failures[theirs.ticket_id])
    assert sorted(kind for kind, _ in rig.events.reports) == ["ended", "ended", "failed"]


def test_a_refused_commit_reaches_every_sender_with_its_reason(rig: RankRig) -> None:
    rig.events.refusal = NoCapacity("no room: 3 sequences, 2 free")
    ticket = rig.open(30, (3, 4))

    rig.hand_over(ticket, (1, 2))
    rig.events.wait("failed", ticket.ticket_id)
    rig.events.wait("ended", ticket.ticket_id)
    until(lambda: settled(rig))

    assert type(rig.events.failures[ticket.ticket_id]) is NoCapacity
    assert sorted(kind for kind, _ in rig.events.reports) == ["ended", "failed"]


def test_a_lease_that_expires_on_one_rank_ends_all(rig: RankRig) -> None:
    ticket = rig.open(30, (3, 4))
    rig.progress_age = 1e9
    rig.sender.begin(ticket)
    rig.put_all(ticket, (1, 2), layers=1)
    layout, third = rig.d_pools[2].layout, rig.receivers[2]
    wanted = 30 * sum(layout.tensors[tensor].token_bytes for tensor in layout.tensors_of(0))
    until(lambda: third.bytes_received == wanted and not third._table._arrivals._seen)  # what still arrives is alive
    until(lambda: all(receiver.bytes_received > 0 for receiver in rig.receivers))

    third.sweep(rig.clock.now + 30.0)
    rig.events.wait("failed", ticket.ticket_id)
    rig.events.wait("ended", ticket.ticket_id)
    until(lambda: settled(rig))

    assert "lease of 30 s" in str(rig.events.failures[ticket.ticket_id])
    assert sorted(kind for kind, _ in rig.events.reports) == ["ended", "failed"]


def test_a_receiver_that_closes_fails_the_ticket_once(rig: RankRig) -> None:
    ticket = rig.open(30, (3, 4))
    rig.sender.begin(ticket)
    rig.put_all(ticket, (1, 2), layers=1)
    until(lambda: all(receiver.bytes_received > 0 for receiver in rig.receivers))

    rig.receiver.close()
    rig.events.wait("failed", ticket.ticket_id)
    until(lambda: settled(rig))

    assert rig.events.count("failed") == rig.events.count("ended") == 1


def test_the_blocks_are_not_free_before_the_last_rank_has_committed(rig: RankRig) -> None:
    """One rank of P never commits: nothing is admitted, and nothing is acked to the other."""
    ticket = rig.open(30, (3, 4))
    rig.hand_over(ticket, (1, 2), description=b"")
    rig.events.wait("acked", ticket.ticket_id)

    late = rig.open(30, (5, 6))
    rig.sender.begin(late)
    rig.put_all(late, (1, 2))
    rig.senders[0].commit(late.ticket_id, b"")
    until(lambda: rig.receivers[0]._table._tickets[late.ticket_id].committing)
    assert [kind for kind, _ in rig.events.reports] == ["committed", "acked"]

    rig.senders[1].commit(late.ticket_id, b"")
    rig.events.wait("committed", late.ticket_id)


class RawRank:
    """One rank of a sender made by hand."""

    def __init__(self, rig: RankRig, rank: int, ranks: int, receiver_rank: int = 0, **changes: object) -> None:
        layout = rig.p_pools[0].layout
        fields: dict[str, object] = {
            "protocol_version": PROTOCOL_VERSION, "sender_id": "raw", "sender_epoch": 5, "link_epoch": 9,
            "receiver_id": "decode-0", "receiver_epoch": 77, "transport": "tcp", "block_size": layout.block_size,
            "num_blocks": layout.num_blocks, "tensors": layout.model_tensors, "sender_rank": rank,
            "sender_ranks": ranks, "receiver_rank": receiver_rank, "receiver_ranks": len(rig.d_pools),
        }  # fmt: skip
        hello = Hello(**{**fields, **changes})  # type: ignore[arg-type]
        transports = make_transports(("tcp",), rig.p_pools[0])
        self.stream = dial(transports, rig.receiver.endpoints, hello, Timeouts(5, DEADLINE_S)).stream


def test_a_foreign_head_range_is_refused_with_a_reason() -> None:
    with make_rank_rig("tcp", p_ranks=2, d_ranks=1) as rig:
        raw, ticket = RawRank(rig, 1, 2), rig.open(8, (0,))
        before = bytes(rig.d_pools[0].buffer)

        raw.stream.send([encode(Open(ticket.ticket_id, 77, 8, 0))])
        foreign = Frame(ticket.ticket_id, 77, 0, 0, 0, 0, 8, 0, 2, 8 * 2 * 64, 1)
        raw.stream.send([encode(foreign), bytes(foreign.num_bytes)])
        answer = decode(*raw.stream.receive_message(first_byte_s=DEADLINE_S))

        assert isinstance(answer, Abort)
        assert re.search(r"heads \[0, 2\) sent, \[2, 4\) expected", answer.reason)
        assert bytes(rig.d_pools[0].buffer) == before
        rig.events.wait("ended", ticket.ticket_id)
        raw.stream.close()


def test_a_rank_whose_heads_other_ranks_send_cannot_open() -> None:
    """All four hold the one head, and each sends it to one rank of D."""
    with make_rank_rig("tcp", p_ranks=4, d_ranks=4, heads=1) as rig:
        raw, ticket = RawRank(rig, 3, 4), rig.open(8, (0,))

        raw.stream.send([encode(Open(ticket.ticket_id, 77, 8, 0))])
        answer = decode(*raw.stream.receive_message(first_byte_s=DEADLINE_S))

        assert isinstance(answer, Abort)
        assert "cannot be opened here by raw of epoch 5, rank 3 of 4" in answer.reason
        raw.stream.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"receiver_ranks": 2}, "the link is for rank 1 of 2 of decode-0, but this is rank 1 of 4"),
        ({"sender_rank": 4, "sender_ranks": 4}, "rank 4 of 4: ranks count from 0, .* at most 256"),
        ({"sender_ranks": 0}, "rank 0 of 0"),
        ({"sender_ranks": 257}, "rank 0 of 257: .* at most 256"),
        ({"protocol_version": 9}, f"KV protocol version {PROTOCOL_VERSION} here, 9 there"),
        ({"tensors": (KvTensor(0, "k", 3, 16, "float32"),)}, "KV tensors: 4 here, 1 there"),
        ({"num_blocks": 1 << 60}, "bytes, but must have 1 to"),
    ],
)  # fmt: skip
def test_unconvertible_layouts_are_refused_with_both_values(changes: dict[str, object], words: str) -> None:
    with make_rank_rig("tcp", p_ranks=2, d_ranks=4, heads=3) as rig, pytest.raises(Incompatible, match=words):
        RawRank(rig, 0, 2, receiver_rank=1, **changes)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"heads": 4}, "KV of layer 0: k 3x16 float32 here, k 4x16 float32 there"),
        ({"head_dim": 8}, "KV of layer 0: k 3x16 float32 here, k 3x8 float32 there"),
        ({"dtype": "float16"}, "KV of layer 0: k 3x16 float32 here, k 3x16 float16 there"),
        ({"name": "key"}, "KV of layer 0: k 3x16 float32, v 3x16 float32 here, key 3x16 float32, v 3x16 float32 there"),
        ({"layer": 2}, "KV of layer 0: k 3x16 float32, v 3x16 float32 here, v 3x16 float32 there"),
    ],
)
def test_every_value_of_a_tensor_is_compared(theirs: dict[str, object], words: str) -> None:
    with make_rank_rig("tcp", p_ranks=1, d_ranks=1, heads=3) as rig:
        tensors = (replace(rig.tensors[0], **theirs), *rig.tensors[1:])  # type: ignore[arg-type]
        with pytest.raises(Incompatible, match=re.escape(words)):
            RawRank(rig, 0, 1, tensors=tensors)


@pytest.mark.parametrize("p_ranks", [1, 2])
def test_a_ticket_of_more_ranks_than_there_can_be_fails_with_a_reason(p_ranks: int) -> None:
    with make_rank_rig("tcp", p_ranks=p_ranks, d_ranks=1) as rig:
        ticket = rig.open(8, (0,))
        wild = replace(ticket, endpoints=(*ticket.endpoints, replace(ticket.endpoints[0], rank=1 << 30)))

        rig.sender.begin(wild)

        assert isinstance(rig.events.failures[ticket.ticket_id], Incompatible)
        assert "an endpoint has KV rank 1073741824, but an instance has at most 256 ranks" in str(
            rig.events.failures[ticket.ticket_id]
        )


def test_a_rank_that_does_not_listen_fails_the_ticket_with_a_reason() -> None:
    with make_rank_rig("tcp", p_ranks=2, d_ranks=4) as rig:
        ticket = rig.open(8, (0,))
        holed = replace(ticket, endpoints=tuple(one for one in ticket.endpoints if one.rank != 1))

        rig.hand_over(holed, (0,))
        rig.events.wait("failed", ticket.ticket_id)

        assert isinstance(rig.events.failures[ticket.ticket_id], Incompatible)
        until(lambda: settled_senders(rig))


def settled_senders(rig: RankRig) -> bool:
    return not any(sender._routes._routes for sender in rig.senders)
