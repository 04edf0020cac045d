"""A child process that can be killed, and the socket to it; the child's own side is child_limits.py.

python -P -m MODULE DESCRIPTOR PARENT_PID [ARGUMENT...]     DESCRIPTOR is the child's end of the socket
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_KILL_WAIT_S = 10.0
_ROOT = Path(__file__).resolve().parents[1]
_KEPT_VARIABLES = ("PATH", "TZ")


def bare_environ() -> dict[str, str]:
    """Return the environment of a child that reads clients' data: without any secret of ours."""
    environ = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))}


class ChildProcess:
    """Owner of one process and of our end of the socket to it, `connection`. Any thread may kill it."""

    def __init__(
        self, module: str, *arguments: str, environ: Mapping[str, str] | None = None, is_silent: bool = False,
        keeps_stderr: bool = False, own_session: bool = False,
    ) -> None:  # fmt: skip
        """Start the process: `is_silent` discards its stdout, `stderr_tail` needs `keeps_stderr`. Raises OSError.

        An event loop must not start it: uvloop forks, and gRPC, which has threads here, then runs its own handlers
        between fork and exec, some of which crash. Python's subprocess uses vfork, where nothing runs in between.
        """
        self.connection, theirs = socket.socketpair()
        self._stderr = os.fdopen(os.memfd_create(f"{module}-stderr"), "w+b") if keeps_stderr else None
        number = theirs.fileno()
        command = [sys.executable, "-P", "-m", module, str(number), str(os.getpid()), *arguments]
        try:
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    command, pass_fds=(number,), stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL if is_silent else None, stderr=self._stderr, env=environ,
                    start_new_session=own_session,
                )  # fmt: skip
        except BaseException:
            self._release()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_reaped(self) -> bool:
        """Whether the process has ended and `wait` has returned."""
        return self._process.returncode is not None

    def kill(self) -> None:
        """Kill the process; `wait` reaps it."""
        self._process.kill()

    def wait(self, timeout_s: float | None = _KILL_WAIT_S) -> int:
        """Return the exit status, -N after signal N, as soon as the process has ended. Raises TimeoutError."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"process {self.pid} has not exited") from error

    def stderr_tail(self, num_bytes: int) -> bytes:
        """Return the last bytes that the process wrote to its stderr."""
        assert self._stderr is not None
        self._stderr.seek(0)
        return self._stderr.read()[-num_bytes:]

    def close(self) -> None:
        """Kill the process, reap it and release everything. Idempotent. Raises TimeoutError."""
        self.kill()
        self._release()
        self.wait()

    def _release(self) -> None:
        self.connection.close()
        if self._stderr is not None:
            self._stderr.close()
