"""Reads the headers of image files in a process that can be killed (header_child.py runs there)."""

import asyncio
from typing import Any

from images.image_header import ImageHeader
from processes.child import ChildProcess, bare_environ
from processes.frames import frame, receive_object
from telemetry.logs import EventLogger
from wire.errors import InvalidRequest, Unavailable

_CPU_S = 1.0
_WAIT_S = 20.0  # including the start of the process, on a busy machine
_MAX_ANSWER_BYTES = 4096
_log = EventLogger("images")


class HeaderReader:
    """Owner of the process, which starts with the first image, reads one file at a time, and is replaced if it ends."""

    def __init__(self, cpu_s: float = _CPU_S, wait_s: float = _WAIT_S) -> None:
        self._cpu_s, self._wait_s = cpu_s, wait_s
        self._one_at_a_time = asyncio.Lock()
        self._child: ChildProcess | None = None

    async def read(self, data: bytes) -> ImageHeader:
        """Return the header. Raises InvalidRequest for a file that is not an image, Unavailable if none can be read."""
        async with self._one_at_a_time:
            answer = await self._ask(data) or await self._ask(data)  # the process may have ended for another reason
        if answer is None:
            raise InvalidRequest(f"its header takes more than {self._cpu_s:g} s of CPU time, or too much memory")
        if "error" in answer:
            raise InvalidRequest(str(answer["error"]))
        return ImageHeader(str(answer["format"]), int(answer["width"]), int(answer["height"]))

    async def close(self) -> None:
        """Kill the process."""
        await self._replace()

    @property
    def pid(self) -> int | None:
        """The process id, None before the first image."""
        return None if self._child is None else self._child.pid

    async def _ask(self, data: bytes) -> dict[str, Any] | None:
        """Return the answer to a file, None if the process ended or took too long: then the next call starts one."""
        child, answer = self._child or self._start(), None
        try:
            answer = await asyncio.to_thread(_exchange, child, data)
        finally:
            if answer is None:
                await self._replace()
        return answer

    def _start(self) -> ChildProcess:
        """Start the process in the event loop's thread, which outlives it."""
        try:
            child = ChildProcess(
                "scheduler.images.header_child", str(self._cpu_s), environ=bare_environ(), is_silent=True,
                own_session=True,
            )  # fmt: skip
        except OSError as error:
            raise Unavailable(f"the process that reads the headers of images did not start: {error}") from error
        child.connection.settimeout(self._wait_s)
        self._child = child
        return child

    async def _replace(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            _log.info("header_child_ended", pid=child.pid)
            await asyncio.to_thread(child.close)


def _exchange(child: ChildProcess, data: bytes) -> dict[str, Any] | None:
    """Return the answer to a file, None if the process ended or took too long."""
    try:
        child.connection.sendall(frame(data))
        return receive_object(child.connection, _MAX_ANSWER_BYTES)
    except (OSError, ValueError):
        return None
