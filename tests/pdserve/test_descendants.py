"""All descendants of a process are ended, orphans too, within a time limit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.descendants import ProcessPlace, end_process, inhabited
from pdserve.run_folder import start_time

# A child that ends at once, and leaves an orphan in its session and one in a session of its own.
_SCRIPT = """
import subprocess, sys
from pdserve.descendants import end_descendants
sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
middle = (
    "import subprocess, sys; "
    f"pids = [subprocess.Popen({sleeper!r}).pid for _ in range(2)]; print(*pids, flush=True); sys.stdin.read()"
)
child = subprocess.Popen(
    [sys.executable, "-c", middle], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
)
print(child.pid, child.stdout.readline(), flush=True)
print(end_descendants(30.0), end_descendants(0.0), flush=True)
sys.stdin.read()
"""


def test_children_and_grandchildren_are_gone_when_it_returns(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        output = process.stdout.readline()
        while not output.strip():
            output = process.stdout.readline()

        assert output.split() == ["True", "True"]
        assert len(pids) == 3
        assert [start_time(pid) for pid in pids] == [None] * 3
        process.communicate("")


def test_a_process_that_reused_a_pid_is_not_killed() -> None:
    sleeper = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]
    with subprocess.Popen(sleeper, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        started = start_time(process.pid)
        assert started is not None

        another = end_process(process.pid, started - 1)
        alive = process.poll() is None
        process_fd = end_process(process.pid, started)

        assert (another, alive) == (None, True)
        assert process_fd is not None
        os.close(process_fd)
        assert process.wait(timeout=300) == -signal.SIGKILL
        assert end_process(process.pid, started) is None


@pytest.mark.parametrize(("session", "left"), [(7, {7}), (8, set())])
def test_an_empty_session_is_forgotten_before_its_id_is_reused(session: int, left: set[int]) -> None:
    places = {70: ProcessPlace(parent=1, session=session, started=5)}

    assert inhabited({7, 9}, places) == left
