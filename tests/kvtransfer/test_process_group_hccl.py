"""Links whose groups are in processes of their own, under HCCL's rules: what hangs or dies harms its own link only."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from devices.collectives import COLLECTIVES
from kvtransfer.link_codec import encode
from kvtransfer.link_messages import MessageType, Refuse
from kvtransfer.process_group import group_setup, remote_group
from kvtransfer.stream import LinkLost, Stream, expect
from kvtransfer.transport_interface import Timeouts
from native.ticker import run_time
from processes.child import ChildProcess
from tests.kvtransfer import hccl_rules
from tests.kvtransfer import rig as rigs
from tests.kvtransfer.groups import (
    Ends,
    Node,
    group_threads,
    hello_of,
    limit_progress,
    link,
    linked,
    make_node,
    pools_on,
    stream_pair,
)
from tests.kvtransfer.hccl_on_cpu import hccl_on_cpu
from tests.kvtransfer.hccl_rules import Fault, HcclRules, RuleBoundGroup, RuleBroken
from tests.kvtransfer.rig import DEADLINE_S, fill, make_rig, read, until
from wire.errors import Unavailable

P_BLOCKS, D_BLOCKS = (3, 9, 4, 5, 20, 1), (7, 8, 30, 2, 11, 50)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HcclRules]:
    with hccl_on_cpu(monkeypatch, tmp_path) as made:
        yield made


@pytest.fixture
def npu_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pool of the rig lies on its own NPU."""
    monkeypatch.setattr(rigs, "Pool", pools_on("npu"))


def _nodes(names: str) -> list[Node]:
    return [make_node(name, f"npu:{number}") for number, name in enumerate(names)]


@contextmanager
def _failing(p: Node, d: Node) -> "Iterator[Future[Ends]]":
    with ThreadPoolExecutor(1) as makers:
        yield makers.submit(link, p, d, 7, Timeouts(5.0, DEADLINE_S))


@pytest.mark.long
@pytest.mark.parametrize("how", ["hangs", "dies", "fails"])
def test_a_failed_set_up_harms_its_own_link_only(how: Fault, rules: HcclRules) -> None:
    p, d, other = _nodes("pdo")
    rules.break_device("npu:1", how)
    with linked(p, other) as ends:
        before = rules.pids
        with _failing(p, d) as failing:
            until(lambda: failing.done() or len(rules.pids) == len(before) + 2)
            for number in range(10):
                assert ends.receive(ends.send(b"n" * 1_000, number)) == b"n" * 1_000
            if how == "hangs":
                assert not failing.done()
                for pid in {*rules.pids} - {*before}:
                    os.kill(pid, signal.SIGKILL)
            error = failing.exception(DEADLINE_S)
            assert isinstance(error, LinkLost)
            assert ("EI0006: getting socket times out" in str(error)) == (how == "fails")
        assert ends.receive(ends.send(b"after")) == b"after"

        rules.repair("npu:1")
        with linked(p, d, 8) as repaired:
            assert repaired.receive(repaired.send(b"a new epoch")) == b"a new epoch"


def _kill(stream: Stream, rules: HcclRules) -> None:
    until(lambda: len(rules.pids) == 1)
    assert expect(stream, MessageType.SETUP, timeout_s=DEADLINE_S)  # a key: now the process awaits ours
    os.kill(rules.pids[0], signal.SIGKILL)


def _refuse(stream: Stream, rules: HcclRules) -> None:
    stream.send([encode(Refuse("Unavailable", "a link needs 40 bytes of npu:1, which has 3 free"))])
    stream.shutdown()


@pytest.mark.parametrize(
    ("end", "words"),
    [
        pytest.param(_kill, "its process ended with status -9", marks=pytest.mark.long),
        (_refuse, "the peer refused the link: a link needs 40 bytes of npu:1, which has 3 free"),
        (lambda stream, rules: stream.shutdown(), "the peer closed the connection"),
    ],
)
def test_a_set_up_ends_at_once_with_the_reason(
    end: Callable[[Stream, HcclRules], None], words: str, rules: HcclRules
) -> None:
    p, d = _nodes("pd")
    streams, began = stream_pair(DEADLINE_S), run_time()
    with ThreadPoolExecutor(1) as makers:
        made = makers.submit(p.transport.outlet, streams[0], hello_of(p, d), Timeouts(5.0, DEADLINE_S))
        assert expect(streams[1], MessageType.SETUP, timeout_s=DEADLINE_S)
        end(streams[1], rules)
        with pytest.raises(LinkLost, match=f"^the group failed: {words}$"):
            made.result(DEADLINE_S)
        assert run_time() - began < rules.make_s / 2
    for stream in streams:
        stream.close()


@pytest.mark.long
@pytest.mark.usefixtures("npu_pools")
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_link_process_ends_an_idle_link(killed: int, rules: HcclRules) -> None:
    with make_rig("process_group") as rig:
        tokens = fill(rig.p_pool, P_BLOCKS, 20)
        for _ in range(2):
            ticket = rig.open(20, D_BLOCKS)
            rig.hand_over(ticket, P_BLOCKS)
            rig.events.wait("acked", ticket.ticket_id)
            os.kill(rules.pids[-1 - killed], signal.SIGKILL)
            until(lambda: rig.sender.links()[0].state == "down")

        assert read(rig.d_pool, D_BLOCKS, 20) == tokens
        assert rules.made == 4


@pytest.mark.long
def test_a_hung_operation_ends_its_link_and_its_process(rules: HcclRules) -> None:
    p, d, other = _nodes("pdo")
    with linked(p, other, 1) as moving, linked(p, d, 2) as hung:
        limit_progress(hung, 1.0)
        hung.send(b"never taken")
        for number in range(50):
            assert moving.receive(moving.send(b"m" * 1_000, number)) == b"m" * 1_000
        with pytest.raises(LinkLost, match=r"no data was transferred for 1 s"):
            hung.outlet._under_way[0].result(DEADLINE_S)
        hung.outlet.close()

        assert not hung.outlet._group.unfreed  # type: ignore[attr-defined]
        assert moving.receive(moving.send(b"after")) == b"after"


@pytest.mark.long
def test_processes_that_do_not_end_are_limited(rules: HcclRules, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(ChildProcess):
        def kill(self) -> None:
            """Do nothing: the process is in a call of the driver."""

    monkeypatch.setattr(remote_group, "_LEAVE_S", 0.1)
    monkeypatch.setattr(group_setup, "MAX_UNFREED", 1)
    p, d, other = _nodes("pdo")
    with monkeypatch.context() as stuck:
        stuck.setattr(remote_group, "ChildProcess", Stuck)
        link(p, d, 1).close()
    with pytest.raises(Unavailable, match=r"^1 groups of lost links still hold memory on npu:0, and the limit is 1$"):
        link(other, p, 2)
    for pid in rules.pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not group_threads())
    with linked(other, p, 3) as freed:
        assert freed.receive(freed.send(b"freed")) == b"freed"


def test_a_set_up_has_a_time_limit(rules: HcclRules, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLLECTIVES, "hccl", replace(rules.collective(), make_s=0.1))
    p, d = _nodes("pd")
    with pytest.raises(LinkLost, match=r"no hccl group within 0\.2 s|the connection was closed|closed"):
        link(p, d, timeouts=Timeouts(0.2, DEADLINE_S))


@pytest.mark.long
def test_a_group_ends_with_the_process_that_serves(rules: HcclRules) -> None:
    script = """
import time
from pathlib import Path
from kvtransfer.process_group import remote_group
from tests.kvtransfer import hccl_rules
from tests.kvtransfer.groups import link, make_node
hccl_rules.install()
remote_group.PROGRAM = hccl_rules.PROGRAM
ends = link(make_node("p", "npu:0"), make_node("d", "npu:1"))
print("linked", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE) as serving:
        assert serving.stdout is not None
        assert serving.stdout.readline() == b"linked\n"
        serving.kill()
        until(lambda: not any(psutil.pid_exists(pid) for pid in rules.pids))


def test_a_link_that_does_not_fit_is_refused(rules: HcclRules, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2P_HCCL_BUFFSIZE", "64")
    rules.free_bytes = 100 << 20
    p, d = _nodes("pd")

    with pytest.raises(Unavailable, match=f"needs {128 << 20} bytes of npu:1, which has {100 << 20} free"):
        link(p, d)
    assert rules.pids == []


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


class DoneGroup:
    """A group whose operations are done, or fail, at once."""

    def __init__(self, error: str = "") -> None:
        self._error = error

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        def wait(timeout: object) -> None:
            if self._error:
                raise RuntimeError(self._error)

        return SimpleNamespace(wait=wait)


def _send(group: RuleBoundGroup) -> Any:
    return group.send([torch.zeros(1)], 1, 0)


def test_a_creation_that_hangs_stops_its_process(tmp_path: Path) -> None:
    """Two groups of two devices: the reason why links have processes of their own."""
    rules, ended = HcclRules(tmp_path), threading.Event()
    hanging = RuleBoundGroup(lambda: ended.wait(DEADLINE_S) and DoneGroup(), "npu:0", rules)
    other = RuleBoundGroup(DoneGroup, "npu:1", rules)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        first = one.submit(_send, hanging)
        until(rules._queue.locked)
        second = two.submit(_send, other)
        assert not second.done()
        with pytest.raises(TimeoutError):
            second.result(0.1)
        ended.set()
        for sent in (first, second):
            sent.result(DEADLINE_S).wait()


def test_one_thread_issues_for_a_device(tmp_path: Path) -> None:
    rules = HcclRules(tmp_path)
    group = RuleBoundGroup(DoneGroup, "npu:0", rules)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        one.submit(_send, group).result(DEADLINE_S)
        with pytest.raises(RuleBroken, match="which ThreadPoolExecutor"):
            two.submit(_send, group).result(DEADLINE_S)
    with pytest.raises(RuleBroken, match="float8"):
        rules.check("npu:0", [torch.zeros(1, dtype=torch.float8_e5m2)])
    with pytest.raises(RuleBroken, match="abort, which HCCL does not have"):
        group.abort()

    assert len(rules.broken) == 3


def test_an_operation_ends_some_time_after_its_data_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hccl_rules, "_LATE_S", 0.2)
    work = _send(RuleBoundGroup(DoneGroup, "npu:0", HcclRules(tmp_path)))

    assert not work.is_completed()
    until(work.is_completed)


@pytest.mark.parametrize(("handling", "num_broken"), [(None, 1), ("1", 1), ("0", 0)])
def test_a_failure_ends_a_process_by_default(
    handling: str | None, num_broken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_HCCL_ASYNC_ERROR_HANDLING", raising=False)
    if handling is not None:
        monkeypatch.setenv("TORCH_HCCL_ASYNC_ERROR_HANDLING", handling)
    rules = HcclRules(tmp_path)

    with pytest.raises(RuntimeError, match="peer is gone"):
        _send(RuleBoundGroup(lambda: DoneGroup("peer is gone"), "npu:0", rules)).wait()

    assert len(rules.broken) == num_broken


def test_two_processes_need_ports_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCCL_NPU_SOCKET_PORT_RANGE", raising=False)
    one, other = HcclRules(tmp_path), HcclRules(tmp_path)  # as in two processes

    one._listen("npu:0")
    one._listen("npu:0")
    other._listen("npu:1")
    with pytest.raises(RuntimeError, match="port 16666 of npu:0 is in use"):
        other._listen("npu:0")
    monkeypatch.setenv("HCCL_NPU_SOCKET_PORT_RANGE", "auto")
    other._listen("npu:0")
