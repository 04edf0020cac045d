"""The scheduler's side of one process that renders chat templates (sandbox.py is the other side)."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

from scheduler.templates.frames import ANSWER_HEADER, READY, job_frame

_ROOT = Path(__file__).resolve().parent.parent
_KEPT_VARIABLES = ("PATH", "TZ")
_MAX_ANSWER_BYTES = 64 * 2**20
# glibc would keep memory freed by a large render: return it at once, so that the limits are accurate
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


class TemplateChild(asyncio.Protocol):
    """Passes on the answers of one process, in the order of its jobs, and reports when it dies."""

    def __init__(self, answered: Callable[[bytes, bytes], None], ended: Callable[[], None]) -> None:
        """`answered(kind, text)` is called for each answer, `ended()` if the process dies by itself after its start."""
        self._answered, self._ended = answered, ended
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._template: bytes | None = None
        self._ready = asyncio.Event()
        self._reaping: asyncio.Task[int] | None = None
        self._living = True

    @property
    def pid(self) -> int | None:
        """The process id."""
        return None if self._process is None else self._process.pid

    @property
    def gone(self) -> bool:
        """Whether a killed process has been reaped."""
        return self._process is None or self._process.returncode is not None

    async def start(self, render_s: float) -> None:
        """Start the process, with `render_s` of CPU time per render, and wait until it can render.

        Raises OSError if it cannot be started or exits before that.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                self._process = _spawn(theirs, render_s)
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            raise
        await self._ready.wait()
        if not self._living:
            raise ChildProcessError("it ended before it could render")

    def send(self, template: bytes, job: bytes) -> None:
        """Send a job; the template only if it differs from the last job's."""
        assert self._transport is not None
        frame = job_frame(None if template == self._template else template, job)
        self._template = template
        self._transport.write(frame)

    def kill(self) -> None:
        """Kill the process; no callback is called from here on."""
        self._living = False
        self._ready.set()
        if self._transport is not None:
            self._transport.abort()
        if self._process is not None and self._reaping is None:
            self._process.kill()
            self._reaping = asyncio.create_task(asyncio.to_thread(self._process.wait))

    async def wait_gone(self) -> None:
        """Wait until the killed process has been reaped."""
        if self._reaping is not None:
            await self._reaping

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport: asyncio calls this before any data arrives."""
        self._transport = cast(asyncio.Transport, transport)
        if not self._living:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Pass on complete answers."""
        self._received += data
        while self._living and len(self._received) >= ANSWER_HEADER.size:
            (size,) = ANSWER_HEADER.unpack_from(self._received)
            if size > _MAX_ANSWER_BYTES:
                self._end()
            elif len(self._received) < ANSWER_HEADER.size + size:
                return
            else:
                self._take(size)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the process: everything it wrote has arrived by now."""
        self._end()

    def _take(self, size: int) -> None:
        begin = ANSWER_HEADER.size
        kind, text = bytes(self._received[begin : begin + 1]), bytes(self._received[begin + 1 : begin + size])
        del self._received[: begin + size]
        if kind == READY:
            self._ready.set()
        else:
            self._answered(kind, text)

    def _end(self) -> None:
        was_rendering = self._living and self._ready.is_set()
        self.kill()
        if was_rendering:
            self._ended()


def _spawn(end: socket.socket, render_s: float) -> subprocess.Popen[bytes]:
    """Start the process with its end of the socket.

    Not with the event loop: uvloop forks, and gRPC, which has threads here, then runs its own handlers between fork and
    exec, some of which crash. Python's subprocess uses vfork, where nothing runs in between.
    """
    environ = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | _ALLOCATOR
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    command = (sys.executable, "-P", "-m", "scheduler.templates.sandbox", str(render_s))
    number = end.fileno()
    return subprocess.Popen(command, stdin=number, stdout=number, env=environ, start_new_session=True)  # noqa: S603
