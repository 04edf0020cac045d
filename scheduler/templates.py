"""Chat templates, rendered by a warm child process that can be killed (template_sandbox.py)."""

import asyncio
import json
import os
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from telemetry.logs import EventLogger
from wire.errors import InvalidRequest, Overloaded

_RENDER_S = 1.0
_START_S = 10.0
_QUEUE_S = 10.0
_MAX_REPLY_BYTES = 64 * 2**20
_log = EventLogger("templates")


class TemplateRenderer:
    """Owns the child: starts it at first use, kills it when a render takes too long, starts the next one."""

    def __init__(self, render_timeout_s: float = _RENDER_S) -> None:
        self._render_timeout_s = render_timeout_s
        self._turn = asyncio.Lock()
        self._child: Process | None = None

    async def render(self, template: str, context: Mapping[str, Any]) -> str:
        """Return the text. Raises InvalidRequest with the template's own words, Overloaded if others take too long."""
        message = json.dumps({"template": template, "context": dict(context)}).encode()
        try:
            async with asyncio.timeout(_QUEUE_S):
                await self._turn.acquire()
        except TimeoutError:
            raise Overloaded(f"chat templates of other requests took more than {_QUEUE_S:g} s") from None
        try:
            reply = await self._ask(message)
        finally:
            self._turn.release()
        if "error" in reply:
            raise InvalidRequest(f"the chat template refused the messages: {reply['error']}", "messages")
        return str(reply["text"])

    async def start(self) -> None:
        """Start the child now, so that the first request need not wait for it."""
        async with self._turn:
            await self._living_child()

    async def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.returncode is None:
            child.kill()
        if child.stdin:
            child.stdin.close()
        await child.wait()

    async def _ask(self, message: bytes) -> dict[str, Any]:
        child = await self._living_child()
        try:
            async with asyncio.timeout(self._render_timeout_s):
                return await _exchange(child, message)
        except TimeoutError:
            await self.close()
            raise InvalidRequest(
                f"the chat template took longer than {self._render_timeout_s:g} s", "messages"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.close()
            raise InvalidRequest("the chat template used more memory or time than it is allowed", "messages") from None
        except BaseException:
            await self.close()  # an answer half read would be the next one's
            raise

    async def _living_child(self) -> Process:
        """Return a child that has rendered something: imports are not part of a request's second."""
        if self._child is not None and self._child.returncode is None:
            return self._child
        await self.close()
        script = Path(__file__).with_name("template_sandbox.py")
        environ = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        self._child = await asyncio.create_subprocess_exec(
            sys.executable, "-P", str(script), stdin=PIPE, stdout=PIPE, env=environ, start_new_session=True
        )
        try:
            async with asyncio.timeout(_START_S):
                await _exchange(self._child, b'{"template": "", "context": {}}')
        except BaseException:
            await self.close()
            raise
        _log.debug("template_child_started", pid=self._child.pid)
        return self._child


async def _exchange(child: Process, message: bytes) -> dict[str, Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(struct.pack(">I", len(message)) + message)
    await child.stdin.drain()
    (size,) = struct.unpack(">I", await child.stdout.readexactly(4))
    if size > _MAX_REPLY_BYTES:
        raise ConnectionError(f"the template child announced {size} bytes")
    reply = json.loads(await child.stdout.readexactly(size))
    assert isinstance(reply, dict)
    return reply
