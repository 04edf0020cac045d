"""The command returns once its work has detached from the terminal, and with the work's status if it ended before."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_BEGIN = """
import os, signal, sys
from pathlib import Path
from pdserve.background import in_background
from wire.errors import ConfigError

def work(leave):
"""
_END = """
log = Path(sys.argv[1])
print("status", in_background("pdserve up", work, log), flush=True)
print("after", flush=True)
"""


def _command(work: str, log: Path, *, before: str = "") -> "subprocess.Popen[str]":
    code = _BEGIN + "".join(f"    {line}\n" for line in work.splitlines()) + before + _END
    return subprocess.Popen(
        [sys.executable, "-c", code, str(log)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_it_returns_while_the_work_continues_into_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    work = (
        "print('on the terminal', flush=True)\nleave()\nprint('nowhere', flush=True)\n"
        "print(os.getpid(), os.getpgrp(), file=sys.stderr, flush=True)\nsignal.sigwait([signal.SIGTERM])\nreturn 0"
    )
    with _command("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n" + work, log) as command:
        out, err = command.communicate(timeout=300)  # it has closed both, or this would wait for it

        assert (out.splitlines(), err) == (["on the terminal", "status 0", "after"], "")
        while not log.read_text().endswith("\n"):
            pass
        pid, group = map(int, log.read_text().split())
        assert pid == group != command.pid
        os.kill(pid, signal.SIGTERM)


def test_an_early_error_is_one_line_and_ends_the_work(tmp_path: Path) -> None:
    with _command("raise ConfigError('no such model')", tmp_path / "log") as command:
        out, err = command.communicate(timeout=300)

    assert out.splitlines() == ["status 2", "after"]
    assert err == "pdserve up: no such model\n"


def test_a_signal_to_the_command_ends_the_work(tmp_path: Path) -> None:
    work = "def ended(number, frame):\n    sys.exit(7)\nsignal.signal(signal.SIGTERM, ended)\nprint('up', flush=True)\n"
    with _command(work + "signal.pause()", tmp_path / "log") as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "up\n"
        command.send_signal(signal.SIGINT)
        out, _ = command.communicate(timeout=300)

    assert out.splitlines() == ["status 7", "after"]


_TOLD = "def ended(number, frame):\n    sys.exit(143)\nsignal.signal(signal.SIGTERM, ended)\nprint('up', flush=True)\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_exit_status_is_that_of_the_signal(tmp_path: Path, number: signal.Signals, status: int) -> None:
    with _command(_TOLD + "signal.pause()", tmp_path / "log") as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "up\n"
        command.send_signal(number)
        out, _ = command.communicate(timeout=300)

    assert out.splitlines() == [f"status {status}", "after"]


def test_work_ended_while_detaching_is_not_reported_as_done(tmp_path: Path) -> None:
    work = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\nprint('up', flush=True)\n"
        "signal.sigwait([signal.SIGTERM])\nleave()\nreturn 0"
    )
    with _command(work, tmp_path / "log") as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "up\n"
        command.send_signal(signal.SIGINT)
        out, _ = command.communicate(timeout=300)

    assert out.splitlines() == ["status 130", "after"]


# The signal comes when the work has detached, after the last check for it and before any message.
_TOLD_LATE = """
import contextlib
from pdserve import background
forward_signals = background._forward_signals
@contextlib.contextmanager
def and_signals(pid, report):
    with forward_signals(pid, report):
        yield
        os.kill(os.getpid(), signal.SIGTERM)
background._forward_signals = and_signals
"""


def test_work_ended_just_after_detaching_is_not_reported_as_done(tmp_path: Path) -> None:
    work = "signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))\nleave()\nsignal.pause()"
    with _command(work, tmp_path / "log", before=_TOLD_LATE) as command:
        out, _ = command.communicate(timeout=300)

    assert out.splitlines() == ["status 143", "after"]


@pytest.mark.parametrize("end", ["return 0", "os.kill(os.getpid(), signal.SIGTERM)", "raise KeyboardInterrupt"])
def test_work_stopped_by_others_before_detaching_has_a_reason(tmp_path: Path, end: str) -> None:
    with _command(_TOLD + end, tmp_path / "log") as command:
        _, err = command.communicate(timeout=300)

    words = "the cluster was stopped before it was ready, by `pdserve down` or by a signal to its supervisor"
    assert err.splitlines()[-1] == f"wire.errors.Unavailable: {words}"


def test_work_that_is_killed_is_reported(tmp_path: Path) -> None:
    with _command("os.kill(os.getpid(), signal.SIGKILL)", tmp_path / "log") as command:
        _, err = command.communicate(timeout=300)

    assert err.splitlines()[-1] == "wire.errors.Unavailable: the process that starts the cluster was killed by SIGKILL"
