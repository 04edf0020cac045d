"""The scheduler's side of one process that renders chat templates (sandbox.py is the other side)."""

import asyncio
from collections.abc import Callable
from typing import cast

from processes.child import ChildProcess, bare_environ
from processes.frames import frame, take_frame
from scheduler.templates.frame_kinds import CHANGED, READY

_MAX_ANSWER_BYTES = 64 * 2**20
# glibc would keep memory freed by a large render: return it at once, so that the limits are accurate
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


class TemplateChild(asyncio.Protocol):
    """Passes on the answers of one process, in the order of its jobs, and reports when it dies."""

    def __init__(self, answered: Callable[[bytes, bytes], None], ended: Callable[[], None]) -> None:
        """`answered(kind, text)` is called for each answer, `ended()` if the process dies by itself after its start."""
        self._answered, self._ended = answered, ended
        self._process: ChildProcess | None = None
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
        return self._process is None or self._process.is_reaped

    async def start(self, render_s: float) -> None:
        """Start the process, with `render_s` of CPU time per render, and wait until it can render.

        Raises OSError if it cannot be started or exits before that.
        """
        self._process = ChildProcess(
            "scheduler.templates.sandbox", str(render_s), environ=bare_environ() | _ALLOCATOR, is_silent=True,
            own_session=True,
        )  # fmt: skip
        connection = self._process.connection
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)
        except BaseException:
            connection.close()
            raise
        await self._ready.wait()
        if not self._living:
            raise ChildProcessError("it ended before it could render")

    def send(self, template: bytes, job: bytes) -> None:
        """Send a job; the template only if it differs from the last job's."""
        assert self._transport is not None
        changed = () if template == self._template else (CHANGED, template)
        self._template = template
        self._transport.write(frame(*changed) + frame(job))

    def kill(self) -> None:
        """Kill the process; no callback is called from here on."""
        self._living = False
        self._ready.set()
        if self._transport is not None:
            self._transport.abort()
        if self._process is not None and self._reaping is None:
            self._process.kill()
            self._reaping = asyncio.create_task(asyncio.to_thread(self._process.wait, None))

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
        while self._living and (answer := self._next_answer()) is not None:
            kind, text = answer[:1], answer[1:]
            if kind == READY:
                self._ready.set()
            else:
                self._answered(kind, text)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the process: everything it wrote has arrived by now."""
        self._end()

    def _next_answer(self) -> bytes | None:
        try:
            return take_frame(self._received, _MAX_ANSWER_BYTES)
        except ValueError:
            self._end()
            return None

    def _end(self) -> None:
        was_rendering = self._living and self._ready.is_set()
        self.kill()
        if was_rendering:
            self._ended()
