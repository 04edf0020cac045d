"""Run one command under a time limit, log its output without secrets, and leave none of its processes behind."""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from benchmarks.contact.report import DONE
from pdserve.descendants import end_descendants
from pdserve.redaction import redacted

_PR_SET_CHILD_SUBREAPER = 36
_UNWIND_S, _END_S, _POLL_S = 15.0, 30.0, 0.2
_CHUNK = 65_536
TIMED_OUT = "timed out"


class Interrupted(Exception):
    """Ctrl-C or SIGTERM, after the command's processes have ended."""


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, so that they are found and ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_limited(
    command: Sequence[str], log: Path, *, limit_s: float, secrets: Iterable[str], environ: Mapping[str, str]
) -> str:
    """Run `command`, append its output to `log`, and return "ok", its exit status or signal, or "timed out".

    Ends every descendant of this process; the result says so if one did not end. Raises Interrupted.
    """
    deadline, hidden = time.monotonic() + limit_s, tuple(secrets)
    with log.open("a", encoding="utf-8") as file:
        file.write(redacted(f"$ {' '.join(command)}\n", hidden))
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={**os.environ, **environ}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return f"not started: {error.strerror}: {command[0]}"
        assert process.stdout is not None, "it is a pipe"
        output = _Output(process.stdout, file, hidden)
        try:
            ended = _wait(process, output, deadline)
            if not ended:
                _unwind(process, output)
        except KeyboardInterrupt:
            with contextlib.suppress(KeyboardInterrupt):  # a second one kills at once
                _unwind(process, output)
            raise Interrupted from None
        finally:
            have_ended = end_descendants(_END_S)
            status = process.poll()  # not waited for: a process that hangs in a driver does not end
            output.close()
            _reap()
    result = _result(status if ended else None)
    return result if have_ended else f"{result}, and one of its processes did not end after kill -9"


def _result(status: int | None) -> str:
    if status is None:
        return TIMED_OUT
    return (
        DONE if status == 0 else f"exit status {status}" if status > 0 else f"ended by {signal.Signals(-status).name}"
    )


def _wait(process: "subprocess.Popen[bytes]", output: "_Output", deadline: float) -> bool:
    """Copy the output until the process has ended; return False at the deadline."""
    while process.poll() is None:
        if time.monotonic() >= deadline:
            return False
        output.copy(min(_POLL_S, max(0.0, deadline - time.monotonic())))
    return True


def _unwind(process: "subprocess.Popen[bytes]", output: "_Output") -> None:
    """Give the command limited time to stop the processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    _wait(process, output, time.monotonic() + _UNWIND_S)


def _reap() -> None:
    """Collect the exit statuses of adopted orphans."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


class _Output:
    """Copies a command's output to the log in whole lines, without secrets. Owns the pipe."""

    def __init__(self, pipe: IO[bytes], file: IO[str], secrets: tuple[str, ...]) -> None:
        os.set_blocking(pipe.fileno(), False)
        self._pipe, self._file, self._secrets, self._rest = pipe, file, secrets, b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(pipe, selectors.EVENT_READ)

    def copy(self, within_s: float) -> None:
        """Copy the output that is there or arrives in time."""
        if not self._selector.get_map():  # the command closed the pipe but still runs
            time.sleep(within_s)
            return
        if self._selector.select(within_s):
            chunk = os.read(self._pipe.fileno(), _CHUNK)
            if not chunk:
                self._selector.unregister(self._pipe)
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            self._write(b"".join(line + b"\n" for line in lines))

    def close(self) -> None:
        """Copy the rest and close the pipe."""
        while self._selector.get_map() and self._selector.select(0):
            self.copy(0)
        self._write(self._rest)
        self._selector.close()
        self._pipe.close()

    def _write(self, text: bytes) -> None:
        self._file.write(redacted(text.decode("utf-8", "replace"), self._secrets))
        self._file.flush()
