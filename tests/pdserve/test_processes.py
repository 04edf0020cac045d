"""Children are started in their own sessions, watched, and stopped by SIGTERM or, if they ignore it, by SIGKILL."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.layout import ProcessPlan
from pdserve.processes import Child, stop, stop_children
from pdserve.run_folder import ProcessRecord

_STUBBORN = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
_WITH_ENGINE = "import os, signal; print(os.fork() or 'up', flush=True); signal.pause()"
_MEEK = "import signal; print('up', flush=True); signal.pause()"


class _Spawner:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.children: list[Child] = []

    def __call__(self, code: str, role: str = "decode", **env: str) -> Child:
        plan = ProcessPlan(f"{role}-{len(self.children)}", role, "x:1", (sys.executable, "-S", "-c", code), env)
        self.children.append(Child(plan, self._folder / plan.name, os.environ))
        return self.children[-1]

    def when_up(self, code: str, role: str = "decode", **env: str) -> Child:
        child = self(code, role, **env)
        while "up" not in Path(child.record.log).read_text():
            assert child.ended() is None
        return child


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[_Spawner]:
    spawner = _Spawner(tmp_path)
    yield spawner
    stop([child.record for child in spawner.children], 0.0)
    assert all(child.ended() for child in spawner.children)


def test_a_child_that_ends_is_reported_with_last_line_and_log(spawn: _Spawner) -> None:
    child = spawn("print('first'); print('no such model'); raise SystemExit(2)")
    while (end := child.ended()) is None:
        pass

    assert end == f"decode-0 ended with exit status 2: no such model (log: {child.record.log})"


def test_a_process_that_ends_on_sigterm_is_not_killed(spawn: _Spawner) -> None:
    child = spawn.when_up(_MEEK)

    assert stop([child.record]) == ()
    assert child.ended() == f"decode-0 ended with signal SIGTERM: up (log: {child.record.log})"


def test_a_process_that_ignores_sigterm_is_killed(spawn: _Spawner) -> None:
    child = spawn.when_up(_STUBBORN, "scheduler")

    assert stop([child.record], 0.1) == (child.record,)
    assert not child.record.alive


def test_down_with_timeout_0_kills_every_role_at_once(spawn: _Spawner) -> None:
    children = [spawn.when_up(_STUBBORN, "scheduler"), spawn.when_up(_STUBBORN)]
    looks = iter([False, False])  # then the user presses Ctrl-C again

    killed = stop([child.record for child in children], 600.0, lambda: next(looks, True))

    assert killed == tuple(child.record for child in children)


def test_a_reused_pid_is_left_alone(spawn: _Spawner) -> None:
    child = spawn.when_up(_MEEK)
    record = child.record
    reused = ProcessRecord(record.name, record.role, record.pid, record.started + 1, record.address, record.log)

    assert stop([reused]) == ()
    assert record.alive


def _see_its_death(child: Child) -> None:
    os.kill(child.record.pid, signal.SIGKILL)
    while child.ended() is None:
        pass


def _stop_in_order(child: Child) -> None:
    assert stop_children([child]) == ()


@pytest.mark.parametrize("end", [_see_its_death, _stop_in_order])
def test_a_workers_engine_ends_with_its_server(end: Callable[[Child], None], spawn: _Spawner) -> None:
    child = spawn.when_up(_WITH_ENGINE, PDSERVE_WORKER="vllm")
    (engine,) = psutil.Process(child.record.pid).children()

    end(child)

    psutil.wait_procs([engine], timeout=60)
    assert not engine.is_running()


def test_the_last_runs_log_is_kept_beside_the_new_one(spawn: _Spawner, tmp_path: Path) -> None:
    (tmp_path / "decode-0").write_text("the crash one looks for\n")

    child = spawn.when_up(_MEEK)

    assert Path(child.record.log + ".1").read_text() == "the crash one looks for\n"
