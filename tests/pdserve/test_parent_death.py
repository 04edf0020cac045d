"""A child that calls die_with_parent dies with it, however that ends."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.parent_death import VARIABLE, die_with_parent
from wire.errors import ConfigError

# The parent starts a child as `up` does, prints its pid once it has called die_with_parent, and waits.
_PARENT = """
import os, signal, sys
from pathlib import Path
from pdserve.process_plan import ProcessPlan
from pdserve.processes import Child
code = "import os, signal; from pdserve.parent_death import die_with_parent; {child}"
log = Path(sys.argv[1])
child = Child(ProcessPlan("decode-0", "decode", "x:1", (sys.executable, "-c", code), {{}}), log, os.environ)
while "up" not in log.read_text():
    assert child.ended() is None, log.read_text()
print(child.record.pid, flush=True)
signal.pause()
"""
_HOLDS_ON = "die_with_parent(os.environ); print('up', flush=True); signal.pause()"
_LATE = "print('up', flush=True); os.read(0, 0); signal.sigtimedwait([signal.SIGUSR1], 60); " + _HOLDS_ON
_STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " + _HOLDS_ON


def _parent(child: str, log: Path) -> "tuple[subprocess.Popen[str], int]":
    """Start both; return the parent and a pipe that closes when the child ends."""
    command = [sys.executable, "-c", _PARENT.format(child=child), str(log)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, os.pidfd_open(int(parent.stdout.readline()))


def _left_by(child: str, tmp_path: Path) -> str:
    """Return what this child has written to its `left` when it has ended, after its parent was killed."""
    script, left = tmp_path / "child.py", tmp_path / "left"
    script.write_text(child.format(left=str(left)))
    parent, child_fd = _parent(f"exec(open({str(script)!r}).read())".replace('"', "'"), tmp_path / "log")
    with parent:
        parent.kill()
        parent.wait()
    assert _has_ended(child_fd)
    os.close(child_fd)
    return left.read_text()


def _has_ended(child_fd: int, timeout_s: float = 120.0) -> bool:
    return bool(select.select([child_fd], [], [], timeout_s)[0])


@pytest.mark.parametrize("child", [_HOLDS_ON, _STUBBORN])
def test_a_killed_parent_takes_its_child_with_it(child: str, tmp_path: Path) -> None:
    parent, child_fd = _parent(child, tmp_path / "log")
    with parent:
        assert not _has_ended(child_fd, 0.0)
        parent.kill()
        parent.wait()

    assert _has_ended(child_fd)
    os.close(child_fd)


@pytest.mark.parametrize("hears", ["signal.pause()", "signal.pthread_sigmask(signal.SIG_BLOCK, [10]); signal.pause()"])
def test_a_child_cleans_up_before_it_ends(hears: str, tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.touch()
    child = f"die_with_parent(os.environ, lambda: os.unlink({str(left)!r})); print('up', flush=True); {hears}"
    parent, child_fd = _parent(child.replace('"', "'"), tmp_path / "log")
    with parent:
        parent.kill()
        parent.wait()

    assert _has_ended(child_fd)
    assert not left.exists()
    os.close(child_fd)


# It has a child in its own session, which has another child; neither calls die_with_parent.
_FAMILY = """
import os, signal, subprocess, sys
from pathlib import Path
from pdserve.run_folder import start_time
from pdserve.parent_death import die_with_parent
grandchild = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); print(p.pid, flush=True); "
command = [sys.executable, "-c", child + "p.wait()", grandchild]
process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
pids = [process.pid, int(process.stdout.readline())]
def at_end():
    Path({left!r}).write_text(str([start_time(pid) for pid in pids]))
die_with_parent(os.environ, at_end)
print("up", flush=True)
signal.pause()
"""


def test_folders_are_removed_after_their_processes_ended(tmp_path: Path) -> None:
    assert _left_by(_FAMILY, tmp_path) == "[None, None]"


# Both the signal and the pipe report its parent's end: the second would find orphans that it does not know.
_TOLD_TWICE = """
import os, signal, threading
from pathlib import Path
from pdserve import parent_death
entered, both = [], threading.Event()
def end_once(timeout_s):
    entered.append(threading.get_ident())
    if len(entered) > 1:
        both.set()
    both.wait(1.0)
parent_death.end_descendants = end_once
parent_death.die_with_parent(os.environ, lambda: Path({left!r}).write_text(str(len(entered))))
print("up", flush=True)
signal.pause()
"""


def test_two_signals_end_the_children_once(tmp_path: Path) -> None:
    assert _left_by(_TOLD_TWICE, tmp_path) == "1"


# Only the pipe reports it, on its own thread; the main thread would continue and recreate what is removed.
_GOES_ON = """
import os, select, signal
from pathlib import Path
from pdserve import parent_death
folder, removed, again = Path({folder!r}), os.pipe(), os.pipe()
def at_end():
    folder.rmdir()
    os.write(removed[1], b"1")
    select.select([again[0]], [], [], 1.0)
parent_death.die_with_parent(os.environ, at_end)
print("up", flush=True)
os.read(removed[0], 1)
folder.mkdir()
os.write(again[1], b"1")
signal.pause()
"""


def test_a_folder_being_removed_is_not_recreated(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    held, ours = os.pipe()
    command = [sys.executable, "-c", _GOES_ON.format(folder=str(folder))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, pass_fds=(held,), env={**os.environ, VARIABLE: str(held)}
    ) as child:
        os.close(held)
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        os.close(ours)

        assert child.wait(300) == -signal.SIGKILL
    assert not folder.exists()


def test_a_parent_that_died_before_the_call_ends_it_too(tmp_path: Path) -> None:
    parent, child_fd = _parent("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); " + _LATE, tmp_path / "log")
    with parent:
        parent.kill()
        parent.wait()
    assert not _has_ended(child_fd, 0.0)

    signal.pidfd_send_signal(child_fd, signal.SIGUSR1)

    assert _has_ended(child_fd)
    os.close(child_fd)


def test_without_the_variable_no_parent_is_watched() -> None:
    environ = {"KEPT": "1"}

    die_with_parent(environ)

    assert environ == {"KEPT": "1"}


@pytest.mark.parametrize("reported", ["", "x", "1000000", "-1"])
def test_anything_but_a_pipe_is_refused(reported: str) -> None:
    with pytest.raises(ConfigError, match=f"{VARIABLE} is '{reported}', which is not a pipe"):
        die_with_parent({VARIABLE: reported})
