"""A build in the background: a child whose compilers have low priority, and which ends when its parent does.

parent                          child (native/build_child.py)
---- stdin: nothing but its end -->  that end stops the build: no compiler, no draft is left
<--- stdout: why it failed --------  empty where it did not
---- the library's lock ---------->  held until it ends, so that of many processes one builds
"""

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

BACKGROUND_TIMEOUT_S = 900.0
"""Who stands back may be waiting long for a core."""
_ROOT = str(Path(__file__).parents[1])
_GRACE_S = 10.0
_SAID_MAX = 2000

Told = Callable[[str | None], None]
"""Told the end of a build, from its own thread: None, or why it failed."""


class Build:
    """Owner of the child process and of the thread that waits for it."""

    def __init__(self, process: "subprocess.Popen[bytes]", told: Told) -> None:
        """Made by start_build."""
        self._process, self._told = process, told
        self._thread = threading.Thread(target=self._watch, name="native-build", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the build has ended, well or not, and was told of, within the time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _watch(self) -> None:
        with self._process as process:
            assert process.stdout is not None
            poll = select.poll()
            poll.register(process.stdout, select.POLLIN)
            if not poll.poll((BACKGROUND_TIMEOUT_S + _GRACE_S) * 1000):
                process.kill()
            said = process.stdout.read(_SAID_MAX).decode(errors="replace").strip()
        if process.returncode == 0:
            self._told(None)
        else:
            self._told(said or f"its build ended with status {process.returncode}")


def start_build(name: str, lock_fd: int, environ: Mapping[str, str], told: Told) -> Build:
    """Let a child build library `name`, whose lock is `lock_fd`; the caller closes its own. Raises OSError."""
    command = [sys.executable, "-P", "-m", "native.build_child", name, str(lock_fd)]
    ours = os.pathsep.join(filter(None, (_ROOT, environ.get("PYTHONPATH"))))  # it builds these sources, no others
    process = subprocess.Popen(  # noqa: S603  our own interpreter and module
        command, env={**environ, "PYTHONPATH": ours}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, pass_fds=(lock_fd,), process_group=0, cwd=os.sep,
    )  # fmt: skip
    return Build(process, told)
