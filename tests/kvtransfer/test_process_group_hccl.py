"""The same links under HCCL's rules: one issuing thread per device, creation in turn, no abort."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from devices.collectives import COLLECTIVES
from kvtransfer.process_group.link_ends import MAX_PAYLOAD_BYTES
from kvtransfer.stream import LinkLost
from kvtransfer.transport import Timeouts
from tests.kvtransfer import rig as rigs
from tests.kvtransfer.groups import (
    Node,
    group_threads,
    hand_over_many,
    hurry,
    link,
    linked,
    make_node,
    pools_on,
    stopping,
)
from tests.kvtransfer.hccl_rules import HcclRules, RuleBroken
from tests.kvtransfer.rig import DEADLINE_S, fill, make_rig, read, until
from wire.errors import Unavailable

P_BLOCKS, D_BLOCKS = (3, 9, 4, 5, 20, 1), (7, 8, 30, 2, 11, 50)


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[HcclRules]:
    made = HcclRules()
    monkeypatch.setitem(COLLECTIVES, "hccl", made.collective())
    yield made
    assert made.broken == []
    until(lambda: not group_threads())


@pytest.fixture
def npu_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pool of the rig lies on its own NPU."""
    monkeypatch.setattr(rigs, "Pool", pools_on("npu"))


def _nodes(names: str) -> list[Node]:
    return [make_node(name, f"npu:{number}") for number, name in enumerate(names)]


@pytest.mark.usefixtures("rules")
def test_two_ends_on_one_device_of_one_process_are_refused() -> None:
    with pytest.raises(Unavailable, match=r"^both ends of the link are in this process, on npu:0$"):
        link(make_node("p", "npu:0"), make_node("d", "npu:0"))


@pytest.mark.usefixtures("npu_pools")
def test_whole_hand_offs_keep_the_rules(rules: HcclRules) -> None:
    hand_over_many()

    assert rules.made == 2


@pytest.mark.usefixtures("npu_pools")
def test_a_corrupt_frame_is_sent_once_more(rules: HcclRules) -> None:
    with make_rig("process_group", failpoints="kv.send.mid=corrupt@3") as rig:
        tokens = fill(rig.p_pool, P_BLOCKS, 20)
        ticket = rig.open(20, D_BLOCKS)

        rig.hand_over(ticket, P_BLOCKS)
        rig.events.wait("acked", ticket.ticket_id)

        assert read(rig.d_pool, D_BLOCKS, 20) == tokens
        assert rig.receiver.counts.corrupt_frames == 1


def test_links_in_a_cycle_are_made_in_turn_on_every_device(rules: HcclRules) -> None:
    nodes = _nodes("abc")
    pairs = [(one, two) for one in nodes for two in nodes if one is not two]
    with ThreadPoolExecutor(len(pairs)) as makers:
        for round_number in range(5):
            links = [
                made.result(DEADLINE_S)
                for made in [makers.submit(link, *pair, 10 * round_number + i) for i, pair in enumerate(pairs)]
            ]
            for i, ends in enumerate(links):
                assert ends.receive(ends.send(bytes([i]) * 100)) == bytes([i]) * 100
            for closed in [makers.submit(ends.close) for ends in links]:
                closed.result(DEADLINE_S)

    assert rules.made == 5 * len(pairs) * 2


def test_a_peer_stopped_before_the_proof_holds_only_its_turn(rules: HcclRules) -> None:
    p, silent, other = _nodes("pso")
    with stopping(p, silent, Timeouts(1.5, DEADLINE_S), proves=False) as made:
        with linked(other, p, 8, Timeouts(5.0, DEADLINE_S / 2)) as ends:
            assert ends.receive(ends.send(b"its turn")) == b"its turn"
        assert isinstance(made.exception(DEADLINE_S), LinkLost)


def test_a_hung_link_is_abandoned_and_freed_after_its_work(rules: HcclRules) -> None:
    p, d = _nodes("pd")
    hung = link(p, d, 1)
    hurry(hung, 0.5)
    hung.send(b"never taken")
    with pytest.raises(LinkLost, match=r"no data was transferred for 0\.5 s"):
        hung.fill(MAX_PAYLOAD_BYTES, 4)

    hung.outlet.close()
    assert hung.outlet._group.parked
    with linked(p, d, 2) as rebuilt:
        assert rebuilt.receive(rebuilt.send(b"a new epoch")) == b"a new epoch"
    assert hung.outlet._group.parked
    with pytest.raises(LinkLost):
        hung.send(b"more")

    hung.close()
    until(lambda: not hung.outlet._group.parked)


def test_a_link_that_hangs_delays_no_other_of_its_device(rules: HcclRules) -> None:
    p, deaf, hearing = _nodes("pde")
    with linked(p, deaf, 1) as stalled, linked(p, hearing, 2) as moving:
        hurry(stalled, 1.0)
        stalled.send(b"never taken")
        for number in range(200):
            assert moving.receive(moving.send(b"m" * 1_000, number)) == b"m" * 1_000


@pytest.mark.parametrize("make_s", [0.0, 10.0])
def test_a_creation_gets_the_collectives_timeout(
    make_s: float, rules: HcclRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules.make_s, rules.slow_s = make_s, 0.6
    monkeypatch.setitem(COLLECTIVES, "hccl", rules.collective())
    p, d = _nodes("pd")

    if make_s:
        with linked(p, d, timeouts=Timeouts(0.2, DEADLINE_S)) as ends:
            assert ends.receive(ends.send(b"slow")) == b"slow"
    else:
        with pytest.raises(LinkLost):
            link(p, d, timeouts=Timeouts(0.2, DEADLINE_S))


def test_a_group_creation_outliving_its_link_is_its_devices_only_one(
    rules: HcclRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def hang(store: Any, rank: int, of: int, host: str, timeout_s: float, device: str) -> Any:
        if device == "npu:0" and not over.is_set():
            with rules.issuing(device, "creation"):
                assert over.wait(DEADLINE_S)
        return rules.make(store, rank, of, host, timeout_s, device)

    monkeypatch.setitem(COLLECTIVES, "hccl", replace(rules.collective(), make=hang))
    p, d = _nodes("pd")
    for link_epoch in (1, 2):
        with pytest.raises(LinkLost):
            link(p, d, link_epoch, Timeouts(0.1, DEADLINE_S))
    assert rules.broken == []

    over.set()
    until(lambda: not group_threads())
    with linked(p, d, 3) as ends:
        assert ends.receive(ends.send(b"in its turn")) == b"in its turn"


@pytest.mark.parametrize("full", ["p", "d"])
def test_a_mismatched_link_is_refused_with_both_values(
    full: str, rules: HcclRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = _nodes("pd")
    monkeypatch.setenv("P2P_HCCL_BUFFSIZE", "64")
    rules.free_bytes = 100 << 20

    with pytest.raises((Unavailable, LinkLost)):
        link(p, d)
    assert rules.made == 0

    rules.free_bytes = 128 << 20
    with linked(p, d) as ends:
        assert ends.receive(ends.send(b"fits")) == b"fits"


@pytest.mark.parametrize(
    ("environ", "num_bytes"),
    [
        ({}, 2 * 20 << 20),
        ({"P2P_HCCL_BUFFSIZE": "64"}, 2 * 64 << 20),
        ({"P2P_HCCL_BUFFSIZE": "0"}, 2 * 200 << 20),
        ({"P2P_HCCL_BUFFSIZE": "0", "HCCL_BUFFSIZE": "120"}, 2 * 120 << 20),
    ],
)
def test_a_link_costs_two_buffers(environ: dict[str, str], num_bytes: int) -> None:
    assert COLLECTIVES["hccl"].link_bytes(environ) == num_bytes


def test_nccls_cost_follows_its_channels() -> None:
    link_bytes = COLLECTIVES["nccl"].link_bytes

    assert 45 << 20 < link_bytes({}) < 55 << 20
    assert link_bytes({"NCCL_MAX_P2P_NCHANNELS": "16"}) == 2 * link_bytes({})
    assert link_bytes({"NCCL_MAX_NCHANNELS": "4"}) == link_bytes({}) // 2


def test_the_rules_are_enforced() -> None:
    rules, entered, leave = HcclRules(), threading.Event(), threading.Event()

    def hold() -> None:
        with rules.issuing("npu:0", "creation"):
            entered.set()
            leave.wait(DEADLINE_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert entered.wait(DEADLINE_S)
    with pytest.raises(RuleBroken, match="which Thread"), rules.issuing("npu:0", "send"):
        pass
    leave.set()
    holder.join()
    with pytest.raises(RuleBroken, match="float8"):
        rules.check("npu:0", [torch.zeros(1, dtype=torch.float8_e5m2)])

    assert len(rules.broken) == 2
