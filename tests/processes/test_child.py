"""A child has a socket to its parent, can be killed, and leaves nothing open."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from processes.child import ChildProcess

DEADLINE_S = 300.0
PROGRAM = """
import os, signal, socket, sys
from processes.child_limits import cpu_limit, end_with
end_with(int(sys.argv[2]))
with socket.socket(fileno=int(sys.argv[1])) as connection:
    connection.sendall(sys.argv[3].encode())
    if connection.recv(1) == b"c":
        with cpu_limit(0.01):
            while True:
                pass
    print("the last words", file=sys.stderr)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ChildProcess]:
    """Return a function that starts a child, which waits for a byte."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")

    def started() -> ChildProcess:
        child = ChildProcess("program", "hello", is_silent=True, keeps_stderr=True)
        child.connection.settimeout(DEADLINE_S)
        assert child.connection.recv(5) == b"hello"
        return child

    return started


@pytest.mark.parametrize(("byte", "status"), [(b"x", 0), (b"c", -signal.SIGPROF)])
def test_status_and_stderr_report_how_the_child_ended(
    start: Callable[[], ChildProcess], byte: bytes, status: int
) -> None:
    child = start()
    child.connection.sendall(byte)

    assert child.wait(DEADLINE_S) == status
    assert child.stderr_tail(10) == (b"last words\n"[-10:] if status == 0 else b"")
    child.close()


def test_closing_kills_and_reaps_the_child(start: Callable[[], ChildProcess]) -> None:
    child = start()
    with pytest.raises(TimeoutError, match="has not exited"):
        child.wait(0.0)

    child.close()
    child.close()

    assert child.is_reaped
    assert child.wait() == -signal.SIGKILL
    assert child.connection.fileno() == -1


def test_a_child_that_cannot_start_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[socket.socket]()
    pair = socket.socketpair

    def remembered() -> tuple[socket.socket, socket.socket]:
        made.extend(ends := pair())
        return ends

    monkeypatch.setattr(sys, "executable", "/no/such/python")
    monkeypatch.setattr(socket, "socketpair", remembered)

    with pytest.raises(FileNotFoundError):
        ChildProcess("program")

    assert [end.fileno() for end in made] == [-1, -1]


def test_a_child_ends_with_the_process_that_started_it(start: Callable[[], ChildProcess]) -> None:
    code = (
        "import sys; from processes.child import ChildProcess; child = ChildProcess('program', 'hello'); "
        "child.connection.recv(5); print(child.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()

        child.wait(DEADLINE_S)
