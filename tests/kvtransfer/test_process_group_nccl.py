"""The same links under NCCL's rules: one operation of a device at once, each with its peer's, failures left to us."""

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from devices.collectives import COLLECTIVES
from engine.ranks.marks import Marks, make_marks
from engine.ranks.stream_sum import StreamSum
from kvtransfer.digest import digest_of
from kvtransfer.process_group import group_setup
from kvtransfer.process_group.link_ends import MAX_PAYLOAD_BYTES, OUTLET_BYTES
from kvtransfer.stream import LinkLost
from kvtransfer.transport_interface import Timeouts
from tests.devices.stream import Stream, StreamDevice, stream_collective
from tests.kvtransfer import rig as rigs
from tests.kvtransfer.groups import frame_of, group_threads, hand_over_many, link, linked, make_node, pools_on
from tests.kvtransfer.hccl_rules import RuleBroken
from tests.kvtransfer.nccl_rules import NcclRules, Received, Sent
from tests.kvtransfer.rig import DEADLINE_S, until
from wire.errors import Unavailable
from wire.kv_layout import Rank


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[NcclRules]:
    """nccl is gloo under NCCL's rules; staging is host memory, for pools that only say that they lie on a card."""
    made = NcclRules(on_host=True)
    monkeypatch.setitem(COLLECTIVES, "nccl", made.collective())
    yield made
    assert made.broken == []
    until(lambda: not group_threads())


def test_whole_hand_offs_keep_the_rules(rules: NcclRules, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rigs, "Pool", pools_on("cuda"))
    hand_over_many()

    assert rules.made == 2


def test_links_in_a_circle_are_joined_in_turn_on_every_card(rules: NcclRules) -> None:
    nodes = [make_node(name, f"cuda:{number}") for number, name in enumerate("abc")]
    pairs = list(itertools.permutations(nodes, 2))
    with ThreadPoolExecutor(len(pairs)) as makers:
        made = [makers.submit(link, *pair, number) for number, pair in enumerate(pairs)]
        links = [one.result(DEADLINE_S) for one in made]
        for number, ends in enumerate(links):
            assert ends.receive(ends.send(bytes([number]) * 100)) == bytes([number]) * 100
        for closed in [makers.submit(ends.close) for ends in links]:
            closed.result(DEADLINE_S)

    assert rules.made == 2 * len(pairs)


def test_failed_work_is_never_taken_as_done(rules: NcclRules) -> None:
    ends = link(make_node("p", "cuda:0"), make_node("d", "cuda:1"))
    arriving = ends.inlet._group.receive(ends.inlet._staging, 64)

    ends.outlet.close()
    with pytest.raises(LinkLost, match="the group failed"):
        arriving.result(DEADLINE_S)
    ends.close()


def test_links_are_made_while_torchs_heartbeat_queries_their_store(rules: NcclRules) -> None:
    rules.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    p, d = make_node("p", "cuda:0"), make_node("d", "cuda:1")

    for link_epoch in range(20):
        with linked(p, d, link_epoch, Timeouts(1.0, 2.0)) as ends:
            assert ends.receive(ends.send(b"made")) == b"made"


def test_a_failed_link_stops_no_other_of_its_card(rules: NcclRules) -> None:
    """torch's watchdog keeps the failed group for a time, and the thread that frees it is the one that issues."""
    p, lost, other = make_node("p", "cuda:0"), make_node("lost", "cuda:1"), make_node("other", "cuda:2")
    with linked(p, other, 1, Timeouts(5.0, 3.0)) as moving:
        broken = link(lost, p, 2)
        arriving = broken.inlet._group.receive(broken.inlet._staging, 64)
        broken.outlet.close()
        assert isinstance(arriving.exception(DEADLINE_S), LinkLost)
        broken.close()

        assert moving.receive(moving.send(b"still")) == b"still"


def test_a_hang_in_set_up_harms_its_own_link_only(rules: NcclRules) -> None:
    rules.hung.add("cuda:1")
    p, lost, other = make_node("p", "cuda:0"), make_node("lost", "cuda:1"), make_node("other", "cuda:2")
    with linked(p, other, 1, Timeouts(5.0, 3.0)) as moving, ThreadPoolExecutor(1) as makers:
        made, moved = makers.submit(link, p, lost, 2), 0
        while not made.done():
            assert moving.receive(moving.send(b"meanwhile", moved)) == b"meanwhile"
            moved += 1

        with pytest.raises(LinkLost, match="NCCL timeout in"):
            made.result()
        assert moved > 10  # one, had they waited for the hanging one
        assert moving.receive(moving.send(b"after", moved)) == b"after"


def test_a_peer_that_dies_in_set_up_harms_its_own_link_only(rules: NcclRules) -> None:
    rules.lost.add("cuda:1")
    p, dead, other = make_node("p", "cuda:0"), make_node("dead", "cuda:1"), make_node("other", "cuda:2")
    with linked(p, other, 1, Timeouts(5.0, 3.0)) as moving:
        with pytest.raises(LinkLost, match="ncclRemoteError"):
            link(p, dead, 2)
        assert moving.receive(moving.send(b"after")) == b"after"


def test_a_hanging_link_ends_before_the_sum_behind_it(rules: NcclRules) -> None:
    """The worst case: the device runs sums and frames from one queue (docs/adr/0015-a-devices-pool-is-its-ranks.md)."""
    step_s, stream = 4.0, Stream(ahead=rules.queue)
    marks, store = make_marks(1), os.memfd_create("store")
    add_up = StreamSum(
        stream_collective("nccl", stream), store, Rank(0, 1), Marks(marks, 1), step_s, StreamDevice(stream=stream)
    )  # fmt: skip
    with linked(make_node("p", "cuda:0"), make_node("d", "cuda:1"), 1, Timeouts(5.0, DEADLINE_S, step_s)) as ends:
        arriving = ends.inlet._group.receive(ends.inlet._staging, 64)
        until(lambda: len(rules.queue) == 3)  # two of them were the proof's
        add_up(torch.ones(8))
        add_up.wait(add_up.mark())

        with pytest.raises(LinkLost, match="no data was transferred for 2 s"):
            arriving.result(DEADLINE_S)
    for fd in (marks, store):
        os.close(fd)


def test_frames_arrive_whole_if_operations_end_late(rules: NcclRules) -> None:
    rules.late_s = 0.02
    p, one, two = make_node("p", "cuda:0"), make_node("one", "cuda:1"), make_node("two", "cuda:2")
    payloads = [bytes([number]) * MAX_PAYLOAD_BYTES for number in range(2 * OUTLET_BYTES // MAX_PAYLOAD_BYTES)]
    with linked(p, one, 1) as first, linked(p, two, 2) as second, ThreadPoolExecutor(2) as senders:
        sent = [senders.submit(lambda to: [to.send(one) for one in payloads], ends) for ends in (first, second)]
        frame = frame_of(payloads[0])
        for payload in payloads:
            for ends in (first, second):
                assert ends.receive(replace(frame, digest=digest_of([payload]))) == payload
        for done in sent:
            done.result(DEADLINE_S)


def test_memory_belongs_to_an_operation_until_it_ends() -> None:
    rules, memory = NcclRules(), torch.zeros(4, dtype=torch.uint8)
    received, sent = Received(memory), Sent(memory, rules)

    received.landing.fill_(7)
    assert memory.tolist() == [0, 0, 0, 0]
    received.end()
    assert memory.tolist() == [7, 7, 7, 7]
    sent.end()
    assert rules.broken == ["the memory of a send changed before its end"]


def test_a_wait_for_what_has_not_ended_is_refused(rules: NcclRules, monkeypatch: pytest.MonkeyPatch) -> None:
    rules.late_s = 0.2
    monkeypatch.setitem(COLLECTIVES, "nccl", replace(rules.collective(), polls=False))
    with pytest.raises(LinkLost, match="a wait for an operation that has not ended"):
        link(make_node("p", "cuda:0"), make_node("d", "cuda:1"))

    assert set(rules.broken) == {"a wait for an operation that has not ended"}
    rules.broken.clear()


def test_two_ranks_of_a_communicator_are_on_two_cards() -> None:
    rules = NcclRules()
    rules.enter("pair", "cuda:0")

    with pytest.raises(RuleBroken, match="both ranks of a communicator on cuda:0"):
        rules.enter("pair", "cuda:0")


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([torch.zeros(0, dtype=torch.uint8)], "an operation of 0 bytes"),
        ([torch.zeros(4, 4, dtype=torch.uint8).t()[1:]], "uint8"),
        ([torch.zeros(1, dtype=torch.int16)], "int16"),
        ([torch.zeros(1), torch.zeros(1)], "float32, torch.float32"),
        ([torch.frombuffer(bytearray(8), dtype=torch.uint8)], "memory that is the host's"),
    ],
)
def test_the_rules_of_tensors_are_enforced(tensors: list[torch.Tensor], words: str) -> None:
    rules = NcclRules()

    with pytest.raises(RuleBroken, match=words):
        rules.check("cuda:0", tensors)


def test_no_two_operations_of_a_card_are_issued_at_once() -> None:
    rules = NcclRules()

    with (
        rules.on_own_stream(),
        rules.issuing("cuda:0", "send"),
        rules.issuing("cuda:1", "recv"),
        pytest.raises(RuleBroken, match="recv on cuda:0 during send"),
        rules.issuing("cuda:0", "recv"),
    ):
        pass


def test_no_operation_waits_for_the_stream_that_computes() -> None:
    with (
        pytest.raises(RuleBroken, match="send on the stream that computes on cuda:0"),
        NcclRules().issuing("cuda:0", "send"),
    ):
        pass


def test_groups_of_lost_links_are_limited(rules: NcclRules, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_setup, "MAX_UNFREED", 1)
    rules.hung.add("cuda:1")
    rules.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = "30"
    p, lost, other = make_node("p", "cuda:0"), make_node("lost", "cuda:1"), make_node("other", "cuda:2")
    with pytest.raises(LinkLost):
        link(p, lost, 1, Timeouts(0.2, DEADLINE_S))

    with pytest.raises(Unavailable, match="1 groups of lost links still hold memory on cuda:0, and the limit is 1"):
        link(other, p, 2)
    until(lambda: not group_threads())
    with linked(other, p, 3) as ends:
        assert ends.receive(ends.send(b"freed")) == b"freed"


def test_a_receive_of_a_different_size_than_its_send_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL hangs if the receive is larger, and reports nothing if it is smaller."""
    rules = NcclRules(on_host=True)
    loose = replace(rules.collective(), exact=False)
    monkeypatch.setitem(COLLECTIVES, "nccl", loose)

    with pytest.raises(LinkLost):
        link(make_node("p", "cuda:0"), make_node("d", "cuda:1"))

    assert "operation 0 of rank 0 is (" in rules.broken[0]
    until(lambda: not group_threads())
