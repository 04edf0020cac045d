"""The supervisor over real short-lived processes and a clock of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.process_plan import ProcessPlan
from pdserve.processes import Child, stop
from pdserve.restarts import RestartLimits
from pdserve.run_folder import ProcessRecord
from pdserve.supervisor import Supervisor
from wire.errors import Unavailable

_STAYS = "import signal; print('up', flush=True); signal.pause()"
_DIES = "print('first'); print('no such device'); raise SystemExit(1)"
LIMITS = RestartLimits(max_restarts=2, window_s=60.0, first_wait_s=1.0)


class _Cluster:
    """A supervisor whose processes run given code, and its messages."""

    def __init__(self, folder: Path) -> None:
        self.messages: list[str] = []
        self.reported: list[tuple[ProcessRecord, ...]] = []
        self.spawned: list[tuple[str, bool]] = []
        self.no_fork = self.serves = False
        self.removed: set[str] = set()
        self._folder = folder
        self.supervisor = Supervisor(
            LIMITS, self._spawn, self.messages.append, self.reported.append, lambda plan: plan.name not in self.removed,
            lambda record: self.serves,
        )  # fmt: skip

    def start(self, **code: str) -> None:
        """Start processes by name; `decode_0` is decode-0."""
        names = {name.replace("_", "-"): text for name, text in code.items()}
        self.supervisor.start([
            ProcessPlan(name, name.partition("-")[0], "x:1", (sys.executable, "-S", "-c", text), {})
            for name, text in names.items()
        ])  # fmt: skip

    def record(self, name: str) -> ProcessRecord:
        return next(record for record in self.reported[-1] if record.name == name)

    def wait_dead(self, name: str) -> None:
        child = next(child for child in self.supervisor.children if child.record.name == name)
        while child.ended() is None:
            pass

    def _spawn(self, plan: ProcessPlan, again: bool) -> Child:
        if self.no_fork:
            raise BlockingIOError("no more processes")
        self.spawned.append((plan.name, again))
        return Child(plan, self._folder / f"{plan.name}.log", os.environ, again=again)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[_Cluster]:
    made = _Cluster(tmp_path)
    yield made
    stop([child.record for child in made.supervisor.children], 0.0)
    assert all(child.ended() for child in made.supervisor.children)


def test_a_replacement_time_is_set_once_it_serves(cluster: _Cluster) -> None:
    cluster.start(scheduler=_STAYS)
    os.kill(cluster.record("scheduler").pid, signal.SIGKILL)
    cluster.wait_dead("scheduler")
    cluster.supervisor.tick(10.0)
    cluster.supervisor.tick(11.0)
    assert cluster.record("scheduler").replaced_at is None

    cluster.serves, before = True, time.time()
    cluster.supervisor.tick(12.0)

    assert before <= (cluster.record("scheduler").replaced_at or 0.0) <= time.time()
    assert cluster.messages[-1] == "replaced scheduler in 2.0 s by a new process: serving 2.0 s"


def test_a_dead_process_is_restarted_after_its_wait_and_not_before(cluster: _Cluster) -> None:
    cluster.start(decode_0=_DIES, decode_1=_STAYS)
    cluster.wait_dead("decode-0")

    cluster.supervisor.tick(10.0)
    cluster.supervisor.tick(10.9)
    assert cluster.spawned == [("decode-0", False), ("decode-1", False)]
    assert (cluster.record("decode-0").note, cluster.record("decode-0").restarts) == ("starting again", 1)
    cluster.supervisor.tick(11.0)

    assert cluster.spawned[2:] == [("decode-0", True)]
    assert cluster.record("decode-0").note == ""
    assert cluster.messages[0].startswith("decode-0 ended with exit status 1: no such device (log: ")
    assert cluster.messages[0].endswith("; starting it again in 1 s (1 of 2 in 60 s)")
    assert cluster.messages[1] == f"started decode-0 again, pid {cluster.record('decode-0').pid}"
    assert cluster.record("decode-1").restarts == 0


def test_a_process_dying_too_often_is_given_up_with_its_log(cluster: _Cluster) -> None:
    cluster.start(decode_0=_DIES, decode_1=_STAYS)
    for now in (0.0, 1.0, 1.0, 3.0, 3.0, 99.0):
        if now != 99.0:
            cluster.wait_dead("decode-0")
        cluster.supervisor.tick(now)

    assert len(cluster.spawned) == 4
    words = "gave up on decode-0: it died 3 times in 60 s (limit of restarts: 2). decode-0 ended with exit status 1: "
    assert cluster.messages[-1].startswith(words)
    assert cluster.messages[-1].splitlines()[-2:] == ["  first", "  no such device"]
    assert cluster.record("decode-0").note == "given up"
    assert cluster.record("decode-1").alive


def test_a_cluster_that_serves_without_the_last_of_a_role_goes_on(cluster: _Cluster) -> None:
    cluster.start(prefill_0=_STAYS, decode_0=_DIES)
    cluster.serves = True  # prefill-0 has the role combined by now
    for now in (0.0, 1.0, 1.0, 3.0, 3.0):
        cluster.wait_dead("decode-0")
        cluster.supervisor.tick(now)

    assert cluster.record("decode-0").note == "given up"
    assert cluster.record("prefill-0").alive


@pytest.mark.parametrize("name", ["decode_0", "scheduler"])
def test_the_loss_of_the_last_of_a_role_ends_the_cluster(cluster: _Cluster, name: str) -> None:
    cluster.start(**{"prefill_0": _STAYS, name: _DIES})
    ticks = iter([0.0, 1.0, 1.0, 3.0])
    role = name.partition("_")[0]
    for now in ticks:
        cluster.wait_dead(name.replace("_", "-"))
        cluster.supervisor.tick(now)
    cluster.wait_dead(name.replace("_", "-"))

    with pytest.raises(
        Unavailable, match=rf"^no {role} process is running; stopping the cluster: gave up on .*: no such device"
    ):
        cluster.supervisor.tick(3.0)


def test_a_first_start_that_fails_is_reported_with_a_reason(cluster: _Cluster) -> None:
    cluster.no_fork = True

    with pytest.raises(Unavailable, match=r"^decode-0 cannot be started: no more processes$"):
        cluster.start(decode_0=_STAYS)


def test_a_restart_that_fails_counts_as_a_death(cluster: _Cluster) -> None:
    cluster.start(decode_0=_DIES, decode_1=_STAYS)
    cluster.wait_dead("decode-0")
    cluster.supervisor.tick(0.0)
    cluster.no_fork = True

    cluster.supervisor.tick(1.0)

    assert cluster.messages[-1] == (
        "decode-0 cannot be started: no more processes; starting it again in 2 s (2 of 2 in 60 s)"
    )


def test_a_restarted_process_appends_to_its_log(cluster: _Cluster, tmp_path: Path) -> None:
    cluster.start(decode_0=_DIES, decode_1=_STAYS)
    cluster.wait_dead("decode-0")
    cluster.supervisor.tick(0.0)
    cluster.supervisor.tick(1.0)
    cluster.wait_dead("decode-0")

    assert (tmp_path / "decode-0.log").read_text() == "first\nno such device\n" * 2


def test_the_supervisor_imports_nothing_heavy() -> None:
    heavy = "torch", "transformers", "numpy", "grpc", "pydantic", "tokenizers"
    code = f"import sys, pdserve.up, pdserve.down; print(set({heavy}) & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)

    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_a_process_without_a_table_entry_is_not_restarted(cluster: _Cluster) -> None:
    cluster.start(decode_0=_DIES, decode_1=_STAYS)
    cluster.wait_dead("decode-0")
    cluster.removed.add("decode-0")

    for now in (10.0, 20.0, 30.0):
        cluster.supervisor.tick(now)
    assert len(cluster.spawned) == 2
    assert (cluster.record("decode-0").note, cluster.record("decode-0").restarts) == ("removed", 0)
    assert cluster.messages[0].endswith("; its entry is gone from the table: it is not restarted")
    assert len(cluster.messages) == 1
    cluster.removed.clear()
    cluster.supervisor.tick(40.0)

    assert cluster.spawned[2:] == [("decode-0", True)]
    assert cluster.record("decode-0").note == ""
    assert cluster.messages[1] == "the entry of decode-0 is in the table again"


def test_a_waiting_restart_is_dropped_with_its_table_entry(cluster: _Cluster) -> None:
    cluster.start(decode_0=_DIES, decode_1=_STAYS)
    cluster.wait_dead("decode-0")
    cluster.supervisor.tick(10.0)

    cluster.removed.add("decode-0")
    cluster.supervisor.tick(11.0)

    assert len(cluster.spawned) == 2
    assert cluster.record("decode-0").note == "removed"


def test_a_removed_process_is_not_counted_as_left(cluster: _Cluster) -> None:
    cluster.start(decode_0=_DIES, decode_1=_DIES)
    cluster.removed.add("decode-1")
    cluster.wait_dead("decode-1")
    for now in (10.0, 15.0, 20.0, 25.0):  # two restarts, each due after its wait
        cluster.wait_dead("decode-0")
        cluster.supervisor.tick(now)
    cluster.wait_dead("decode-0")

    with pytest.raises(Unavailable, match="no decode process is running"):
        cluster.supervisor.tick(30.0)
