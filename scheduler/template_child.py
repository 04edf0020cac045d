"""The scheduler's end of one process that renders chat templates (template_sandbox.py is the other)."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

from scheduler.template_frames import ANSWER_HEADER, READY, job_frame

_ROOT = Path(__file__).resolve().parent.parent
_KEPT_VARIABLES = ("PATH", "TZ")
_MAX_ANSWER_BYTES = 64 * 2**20
# glibc would keep what a large render freed: what is freed goes back at once, and the limits mean what they say
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


class TemplateChild(asyncio.SubprocessProtocol):
    """Hands on the answers of one process, in the order of its jobs, and says once that no more will come."""

    def __init__(self, answered: Callable[[bytes, bytes], None], ended: Callable[[], None]) -> None:
        """`answered(kind, text)` is called for each answer, `ended()` if the process dies by itself after its start."""
        self._answered, self._ended = answered, ended
        self._transport: asyncio.SubprocessTransport | None = None
        self._received = bytearray()
        self._template: bytes | None = None
        self._ready = asyncio.Event()
        self._gone = asyncio.Event()
        self._living = True

    @property
    def pid(self) -> int | None:
        """The process's number."""
        return None if self._transport is None else self._transport.get_pid()

    @property
    def gone(self) -> bool:
        """Whether nothing is left of a killed process."""
        return self._gone.is_set()

    async def start(self) -> None:
        """Start the process and wait until it can render. Raises OSError if it cannot be started or ends before."""
        environ = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | _ALLOCATOR
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        arguments = (sys.executable, "-P", "-m", "scheduler.template_sandbox")
        await asyncio.get_running_loop().subprocess_exec(
            lambda: self, *arguments, stderr=None, env=environ, start_new_session=True
        )
        await self._ready.wait()
        if not self._living:
            raise ChildProcessError("it ended before it could render")

    def send(self, template: bytes, job: bytes) -> None:
        """Send a job; the template only where it is not the last job's."""
        assert self._transport is not None
        frame = job_frame(None if template == self._template else template, job)
        self._template = template
        cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0)).write(frame)

    def kill(self) -> None:
        """End the process; nothing is called back from here on."""
        self._living = False
        self._ready.set()
        if self._transport is None:
            self._gone.set()
        else:
            self._transport.close()

    async def wait_gone(self) -> None:
        """Wait until the killed process has left nothing behind."""
        await self._gone.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport: asyncio calls this before anything arrives."""
        self._transport = cast(asyncio.SubprocessTransport, transport)
        if not self._living:
            self._transport.close()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Hand on whole answers."""
        self._received += data
        while self._living and len(self._received) >= ANSWER_HEADER.size:
            (size,) = ANSWER_HEADER.unpack_from(self._received)
            if size > _MAX_ANSWER_BYTES:
                self._end()
            elif len(self._received) < ANSWER_HEADER.size + size:
                return
            else:
                self._take(size)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """The end of its stdout is the end of its answers; all that it wrote has arrived by then."""
        if fd == 1:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio calls this when the process has been waited for and its pipes are closed."""
        self._gone.set()

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
