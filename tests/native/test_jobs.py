"""Commands in parallel: how many run at a time, and that none is left running."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from native.cache import BuildFailed, BuildStopped, NoNative
from native.jobs import Limits, run_jobs

_LONG_S = 300.0
_ENVIRON = {"PATH": os.environ["PATH"]}


def shell(text: str) -> list[str]:
    return ["sh", "-c", text]


def run(*texts: str, at_once: int = 2, timeout_s: float = _LONG_S, stop_fd: int | None = None) -> None:
    limits = Limits(time.monotonic() + timeout_s, stop_fd)
    run_jobs(map(shell, texts), _ENVIRON, at_once=at_once, limits=limits)


@pytest.fixture
def meeting(tmp_path: Path) -> tuple[str, str]:
    """Two commands that each wait until the other runs."""
    for name in ("there", "back"):
        os.mkfifo(tmp_path / name)
    return f"cd {tmp_path}; echo a >there; read b <back", f"cd {tmp_path}; read a <there; echo b >back"


@pytest.fixture
def sleeper(tmp_path: Path) -> tuple[str, Callable[[], bool]]:
    """A command that never ends and starts a child, and a function that waits until both are gone."""
    os.mkfifo(tmp_path / "alive")
    gone = threading.Event()

    def watch() -> None:
        (tmp_path / "alive").read_bytes()  # ends when the last writer is gone
        gone.set()

    threading.Thread(target=watch, daemon=True).start()
    return f"exec 3>{tmp_path}/alive; sleep 600 & echo >{tmp_path}/runs; wait", lambda: gone.wait(_LONG_S)


def test_two_run_at_once(meeting: tuple[str, str]) -> None:
    run(*meeting)


def test_no_more_run_at_once_than_allowed(meeting: tuple[str, str]) -> None:
    with pytest.raises(NoNative, match="sh did not end within its time"):
        run(*meeting, at_once=1, timeout_s=0.5)


def test_all_are_run_in_turn(tmp_path: Path) -> None:
    run(*(f"echo {number} >>{tmp_path}/log" for number in range(5)), at_once=1)

    assert (tmp_path / "log").read_text().split() == list("01234")


def test_a_failed_command_kills_the_others(sleeper: tuple[str, Callable[[], bool]], tmp_path: Path) -> None:
    command, gone = sleeper
    os.mkfifo(tmp_path / "runs")

    with pytest.raises(BuildFailed, match="sh ended with 3: first second"):
        run(command, f"read x <{tmp_path}/runs; echo first; echo second; exit 3", "echo never")

    assert gone()


def test_a_stop_kills_the_running_command(sleeper: tuple[str, Callable[[], bool]], tmp_path: Path) -> None:
    command, gone = sleeper
    os.mkfifo(tmp_path / "runs")
    reader, writer = os.pipe()

    def stop() -> None:
        (tmp_path / "runs").read_bytes()
        os.close(writer)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(BuildStopped):
        run(command, stop_fd=reader)

    assert gone()
    os.close(reader)


def test_long_output_is_read() -> None:
    with pytest.raises(BuildFailed, match=r"ended with 1: x{300}$"):
        run("head -c 300000 /dev/zero | tr '\\0' x; exit 1")


def test_a_command_that_closes_its_output_can_still_time_out() -> None:
    with pytest.raises(NoNative, match="did not end within its time"):
        run("exec >&- 2>&-; exec sleep 600", timeout_s=0.3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_during_a_start_leaves_no_process(
    sleeper: tuple[str, Callable[[], bool]], number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "runs")

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            (tmp_path / "runs").read_bytes()
            signal.raise_signal(number)  # it already runs, and no caller has its handle

    command, is_gone = sleeper
    monkeypatch.setattr("native.jobs.subprocess.Popen", Interrupted)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    try:
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            run(command)
    finally:
        signal.signal(signal.SIGTERM, before)

    assert is_gone()
