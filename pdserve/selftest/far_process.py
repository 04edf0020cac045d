"""The self-test's child processes: one for each device that receives over a link, started on first use.

A child that dies, or does not reply in time, fails the current row; the next row gets a new one. None outlives the
self-test: it stops them on exit, and they exit by themselves when it is killed.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from pdserve.selftest.captured_output import tail
from pdserve.selftest.check import Wrong

COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "pdserve.selftest.far_end")
_START_S, _ANSWER_S = 120.0, 60.0  # the first reply includes importing torch and opening a card
_LEAVE_S = 5.0
_CHUNK = 65_536


class FarProcess:
    """Owns one child; it and its libraries print to `log`."""

    def __init__(self, device: str, log: Path) -> None:
        self._log, self._has_replied, self._rest = log, False, b""
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*COMMAND, device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, bufsize=0,
                process_group=0,  # Ctrl-C reaches the self-test, which stops the child
            )  # fmt: skip

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the reply. If none arrives in time, stop the child and raise Wrong."""
        try:
            with contextlib.suppress(BrokenPipeError):  # its exit is noticed below
                self._require_pipe(self._process.stdin).write(json.dumps(request).encode() + b"\n")
            line = self._read(_ANSWER_S if self._has_replied else _START_S)
        except BaseException:
            self.close()
            raise
        self._has_replied = True
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise Wrong(f"in the receiver: {reply['error']}")
        return reply

    @property
    def is_alive(self) -> bool:
        """Whether the child still runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it by SIGKILL, as a crash would."""
        self._process.kill()
        self._process.wait(_LEAVE_S)

    def close(self) -> None:
        """Stop the child, by SIGKILL if needed. Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            self._require_pipe(pipe).close()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEAVE_S)
                return

    def _read(self, within_s: float) -> bytes:
        pipe, deadline = self._require_pipe(self._process.stdout), time.monotonic() + within_s
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise Wrong(f"the receiver sent nothing within {within_s:g} s{self._last_line()}")
                chunk = os.read(pipe.fileno(), _CHUNK)
                if not chunk:
                    raise Wrong(f"the receiver ended{self._status()}{self._last_line()}")
                self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _status(self) -> str:
        try:
            status = self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            return ""
        return f" by {signal.Signals(-status).name}" if status < 0 else f" with status {status}"

    def _last_line(self) -> str:
        """Return the last line it printed."""
        return "".join(f": {line}" for line in tail(self._log)[-1:])

    @staticmethod
    def _require_pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None, "Popen made both"
        return pipe


class FarProcesses:
    """Owns the children by device; their logs are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._by_device: dict[str, FarProcess] = {}

    def of(self, device: str) -> FarProcess:
        """Return the child of a device such as "cuda:1", restarted if it is gone."""
        found = self._by_device.get(device)
        if found is None or not found.is_alive:
            if found is not None:
                found.close()
            found = FarProcess(device, self._folder / f"far-end-{device.replace(':', '')}.log")
            self._by_device[device] = found
        return found

    def close(self) -> None:
        """Stop all children. Idempotent."""
        while self._by_device:
            self._by_device.popitem()[1].close()
