"""The loss of a rank, killed or stopped, in each phase: an error in bounded time, and nothing is left."""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from engine.ranks.load import LoadedRanks, RanksOptions, load_ranks
from engine.ranks.message_kinds import RankMessageKind
from engine.ranks.team import Team
from engine.step import BatchSequence, SampleRow, StepBatch
from processes.rank_channel import Channel
from processes.rank_payloads import pack_error
from tests.engine.step_runner import GREEDY
from tests.engine.tiny_models import make_tiny_model
from wire.errors import InstanceLost, InternalError, PdserveError

_STEP_S = 2.0
_WAIT_S = 300.0
_SAID = {signal.SIGKILL: "was killed by SIGKILL", signal.SIGSTOP: "is stopped by a signal"}
_SIGNALS = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process of a rank, and no file in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    yield
    assert not _ranks_of(os.getpid())
    assert {name for name in set(os.listdir("/dev/shm")) - before if "pdserve" in name} == set()


class Lost:
    """Records a lost rank."""

    def __init__(self) -> None:
        self.errors: list[PdserveError] = []
        self.reported = threading.Event()

    def __call__(self, error: PdserveError) -> None:
        self.errors.append(error)
        self.reported.set()


def _load(path: Path, lost: Lost) -> LoadedRanks:
    options = RanksOptions(cores=((), ()), num_threads=1, step_s=_STEP_S)
    return load_ranks(
        path, dtype="float32", block_size=16, kv_cache_memory=1 << 20, ranks=options, on_lost=lost
    )  # fmt: skip


def _ranks_of(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if "engine.ranks.process" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def _first_rank(pid: int) -> psutil.Process:
    _wait_until(lambda: bool(_ranks_of(pid)))
    return _ranks_of(pid)[0]


def _step(count: int, start: int = 0) -> StepBatch:
    blocks = tuple(range(1, 2 + (start + count) // 16))
    sequence = BatchSequence(start, count, blocks)
    return StepBatch(tuple(range(5, 5 + count)), (sequence,), (SampleRow(count - 1, GREEDY, 0, 0),))


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.long
@_SIGNALS
def test_a_rank_lost_during_loading_ends_the_load(llama: Path, number: signal.Signals) -> None:
    lost = Lost()
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(_load, llama, lost)
        rank = _first_rank(os.getpid())
        rank.send_signal(number)

        with pytest.raises(InstanceLost, match=rf"rank 1 of 2 \(pid {rank.pid}\) {_SAID[number]}"):
            loading.result(_WAIT_S)

    assert not lost.errors  # the caller of the load gets the exception


@pytest.mark.long
@_SIGNALS
@pytest.mark.parametrize("phase", ["idle", "prefill", "decode"])
def test_a_rank_lost_while_it_serves_ends_the_model(llama: Path, phase: str, number: signal.Signals) -> None:
    lost = Lost()
    model = _load(llama, lost).model
    rank = psutil.Process(model.rank_pids[0])
    try:
        if phase == "decode":
            model.launch(_step(20)).collect()
        step = _step(1, start=20) if phase == "decode" else _step(20)
        hit: Callable[[int], None] | None = None
        if phase == "idle":
            rank.send_signal(number)
        else:
            hit = lambda layer: rank.send_signal(number) if layer == 0 else None  # noqa: E731

        with pytest.raises(InstanceLost, match=rf"rank 1 of 2 \(pid {rank.pid}\) {_SAID[number]}"):
            model.launch(step, hit)

        assert lost.reported.wait(_WAIT_S)
        assert len(lost.errors) == 1
    finally:
        model.close()


@pytest.mark.long
def test_failures_name_their_rank_and_an_orderly_end_names_none(llama: Path) -> None:
    ours = rf"rank 0 of 2 \(pid {os.getpid()}\)"
    for error in (RuntimeError("the device is gone"), InternalError("the device is gone")):
        lost = Lost()
        model = _load(llama, lost).model

        def fail(layer: int, error: Exception = error) -> None:
            raise error

        try:
            with pytest.raises(InstanceLost, match=rf"^{ours} failed within a step: the device is gone; without it"):
                model.launch(_step(20), fail)
            assert len(lost.errors) == 1
        finally:
            model.close()

    lost = Lost()
    model = _load(llama, lost).model
    model._team.marks.advance(1)  # rank 0 has come less far than rank 1
    assert re.match(rf"{ours}: no sum within 2 s; without it", str(model._team.explain("no sum within 2 s")))
    model.close()

    lost = Lost()
    model = _load(llama, lost).model
    model.close()
    assert "this instance is shutting down" in str(model._team.explain("its socket is closed"))
    assert not lost.errors


@pytest.mark.long
def test_a_killed_rank_is_named_so_however_late_the_report(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken connection may be seen long before this process is scheduled to see the end of the other."""
    model = _load(llama, Lost()).model
    rank, may_report, wait_for_end = psutil.Process(model.rank_pids[0]), threading.Event(), Team._wait_for_end
    monkeypatch.setattr("engine.ranks.team._VERDICT_S", 0.0)

    def late(self: Team, child: object) -> None:
        assert may_report.wait(_WAIT_S)
        wait_for_end(self, child)  # type: ignore[arg-type]

    monkeypatch.setattr(Team, "_wait_for_end", late)
    try:
        rank.kill()
        _wait_until(lambda: rank.status() == psutil.STATUS_ZOMBIE)
        with ThreadPoolExecutor(1) as pool:
            explained = pool.submit(model._team.explain, "its connection is closed")
            with contextlib.suppress(TimeoutError):
                explained.result(0.5)
            may_report.set()

            assert f"(pid {rank.pid}) was killed by SIGKILL" in str(explained.result(_WAIT_S))
    finally:
        may_report.set()
        model.close()


@pytest.mark.long
def test_a_failed_rank_that_ends_slowly_is_quoted(llama: Path) -> None:
    lost = Lost()
    model = _load(llama, lost).model
    (child,) = model._team._children
    ours, theirs = socket.socketpair()
    try:
        with Channel(theirs, RankMessageKind) as there, child.channel:
            model._team._children[0] = dataclasses.replace(child, channel=Channel(ours, RankMessageKind))
            there.send(RankMessageKind.FAILED, pack_error(RuntimeError("the device is gone")), timeout_s=_WAIT_S)

            message = str(model._team.explain("its socket is closed"))

        assert message.startswith(f"{child} failed: the device is gone; without it")
        assert len(lost.errors) == 1
    finally:
        model.close()


_RANK_0 = """
import sys
from pathlib import Path
from tests.engine.test_ranks_lost import Lost, _load, _step
print("loading", flush=True)
model = _load(Path(sys.argv[1]), Lost()).model
print("idle", flush=True)
start = 20
model.launch(_step(20)).collect()
while start < 400:
    print("decode", flush=True)
    model.launch(_step(1, start=start), lambda layer: None).collect()
    start += 1
sys.stdin.read()
"""


@pytest.mark.long
@pytest.mark.parametrize("phase", ["loading", "idle", "decode"])
def test_no_rank_outlives_rank_0_whenever_that_is_killed(llama: Path, phase: str) -> None:
    command = [sys.executable, "-P", "-c", _RANK_0, str(llama)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True) as rank_0:
        assert rank_0.stdout is not None
        while (line := rank_0.stdout.readline().strip()) != phase:
            assert line, "rank 0 ended"
        other = _first_rank(rank_0.pid)

        rank_0.kill()

        assert psutil.wait_procs([other], timeout=_WAIT_S)[1] == []
