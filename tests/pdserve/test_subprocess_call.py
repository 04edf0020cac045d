"""A call in a subprocess leaves its files, and nothing else."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.subprocess_call import run_in_fork


def test_its_files_remain_and_its_imports_do_not(tmp_path: Path) -> None:
    def work() -> None:
        import this  # a module that nobody else imports

        (tmp_path / "made").write_text(f"{this.__name__} {os.getpid()}")

    run_in_fork(work)

    name, pid = (tmp_path / "made").read_text().split()
    assert name == "this"
    assert int(pid) != os.getpid()
    assert "this" not in sys.modules


def test_its_failure_ends_nothing_in_this_process() -> None:
    assert not run_in_fork(lambda: sys.exit(3))
    assert not run_in_fork(lambda: 1 // 0)


_LONG = """
import os, signal, subprocess, sys
from pdserve.subprocess_call import run_in_fork

def work():
    child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    print(os.getpid(), child.pid, flush=True)
    signal.pause()

run_in_fork(work)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_its_caller_and_its_children(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", _LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process_fds = [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
        process.send_signal(number)  # to it alone
        process.wait(300)

        ended = [bool(select.select([process_fd], [], [], 30.0)[0]) for process_fd in process_fds]
        for process_fd in process_fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process_fd, signal.SIGKILL)
            os.close(process_fd)
    assert ended == [True, True]
