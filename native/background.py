"""A build in the background: a child process whose compilers have low priority, and which exits with its parent.

parent                          child (native/build_child.py)
---- stdin: only its EOF --------->  stops the build: compilers are killed, drafts removed
<--- stdout: why it failed --------  empty on success
---- the library's lock ---------->  held until it exits, so that only one of many processes builds
"""

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

BACKGROUND_TIMEOUT_S = 900.0
"""Low-priority compilers may wait long for a core."""
_ROOT = str(Path(__file__).parents[1])
_GRACE_S = 10.0
_OUTPUT_MAX = 2000

OnEnd = Callable[[str | None], None]
"""Called when a build ends, from the build's thread: with None, or why it failed."""


class Build:
    """Owner of the child process and of the thread that waits for it."""

    def __init__(self, process: "subprocess.Popen[bytes]", on_end: OnEnd) -> None:
        """Made by start_build."""
        self._process, self._on_end = process, on_end
        self._thread = threading.Thread(target=self._watch, name="native-build", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the build has ended, successfully or not, and `on_end` has returned, within the time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _watch(self) -> None:
        with self._process as process:
            assert process.stdout is not None
            poll = select.poll()
            poll.register(process.stdout, select.POLLIN)
            if not poll.poll((BACKGROUND_TIMEOUT_S + _GRACE_S) * 1000):
                process.kill()
            output = process.stdout.read(_OUTPUT_MAX).decode(errors="replace").strip()
        if process.returncode == 0:
            self._on_end(None)
        else:
            self._on_end(output or f"its build ended with status {process.returncode}")


def start_build(name: str, lock_fd: int, environ: Mapping[str, str], on_end: OnEnd) -> Build:
    """Start a child that builds library `name` and inherits its lock `lock_fd`, which the caller closes.

    Raises OSError.
    """
    command = [sys.executable, "-P", "-m", "native.build_child", name, str(lock_fd)]
    ours = os.pathsep.join(filter(None, (_ROOT, environ.get("PYTHONPATH"))))  # so that it builds these sources
    process = subprocess.Popen(  # noqa: S603  our own interpreter and module
        command, env={**environ, "PYTHONPATH": ours}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, pass_fds=(lock_fd,), process_group=0, cwd=os.sep,
    )  # fmt: skip
    return Build(process, on_end)
