"""Progress of a process's start: named marks with wall-clock and CPU times, written to a pipe to its supervisor.

process --"weights 81234.512 0.41\\n"--> pipe --> supervisor      seconds of CLOCK_MONOTONIC, one clock per host
"""

import contextlib
import os
import stat
import time
from collections.abc import MutableMapping
from dataclasses import dataclass

VARIABLE = "PDSERVE_START_PIPE"
PROCESS, WEIGHTS, GRAPHS, LOADED, SESSION = "process", "weights", "graphs", "loaded", "session"
"""Our code runs; reading of the weights starts; the capture of graphs starts, on devices that have them; the engine is
loaded; a scheduler has opened a session."""
WARM = "warm"
"""A spare process has finished its imports."""
_MAX_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Mark:
    """One mark of a process's start: the time on the host's monotonic clock, and the CPU seconds used until then."""

    name: str
    at: float
    cpu_s: float


class StartMarks:
    """The write end of the pipe. Marks are lost if nobody reads them; any thread may set one."""

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor` is the pipe's write end, None without a supervisor."""
        self.descriptor = descriptor

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> "StartMarks":
        """Return the marks of the pipe in VARIABLE, and remove VARIABLE so that no child process inherits it."""
        text = environ.pop(VARIABLE, "")
        with contextlib.suppress(OSError):
            if text.isdecimal() and stat.S_ISFIFO(os.fstat(int(text)).st_mode):
                os.set_inheritable(int(text), False)
                os.set_blocking(int(text), False)
                return cls(int(text))
        return cls()

    def set(self, name: str) -> None:
        """Report that the start has reached this mark. Never waits, never raises."""
        if self.descriptor is not None:
            line = f"{name} {time.monotonic():.6f} {time.process_time():.6f}\n"
            with contextlib.suppress(OSError):
                os.write(self.descriptor, line.encode())


class MarkReader:
    """The read end of the pipe, in the supervisor. Owns the descriptor `read_end` until `close`."""

    def __init__(self, read_end: int) -> None:
        os.set_blocking(read_end, False)
        self._read_end: int | None = read_end
        self._rest = b""
        self._marks: dict[str, Mark] = {}

    def marks(self) -> dict[str, Mark]:
        """Return the latest mark of each name; malformed lines are skipped. Never waits."""
        if self._read_end is not None:
            with contextlib.suppress(BlockingIOError):
                self._take(os.read(self._read_end, _MAX_BYTES))
        return dict(self._marks)

    def close(self) -> None:
        """Close the pipe. Idempotent."""
        if self._read_end is not None:
            os.close(self._read_end)
            self._read_end = None

    def _take(self, data: bytes) -> None:
        if not data:
            self.close()
        *lines, self._rest = (self._rest[-_MAX_BYTES:] + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                name, at, cpu_s = line.decode().split(" ")
                self._marks[name] = Mark(name, float(at), float(cpu_s))
