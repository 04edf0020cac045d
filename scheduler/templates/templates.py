"""Render chat templates in two killable processes: one for the model's template, one for those of requests."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import orjson

from scheduler.templates.template_queue import TemplateQueue
from wire.errors import InvalidRequest

_RENDER_S = 1.0  # CPU time: waiting on a busy machine does not count
_RENDER_TIMEOUT_S = 30.0
_QUEUE_S = 60.0
_QUICK_BYTES = 2**20  # larger jobs use the slow queue


class TemplateRenderer:
    """Two queues with a process each: a request's template, which may take seconds, does not delay the model's."""

    def __init__(
        self,
        render_s: float = _RENDER_S,
        render_timeout_s: float = _RENDER_TIMEOUT_S,
        queue_timeout_s: float = _QUEUE_S,
    ) -> None:
        self._quick = TemplateQueue(render_s, render_timeout_s, queue_timeout_s)
        self._slow = TemplateQueue(render_s, render_timeout_s, queue_timeout_s)

    async def render(
        self, template: str, context: Mapping[str, Any] | None, *, content_format: str = "auto",
        continue_final_message: bool = False, of_request: bool = False, image_text: str = "",
    ) -> str:  # fmt: skip
        """Return the text, empty if `context` is None: then the template is only compiled.

        `of_request`: the template came with the request. `image_text` stands for an image where the template expects
        contents as one text.

        Raises InvalidRequest with the template's own error, Overloaded if others take too long, Unavailable if the
        process does not start.
        """
        job = {
            "context": context,
            "content_format": content_format,
            "continue_final_message": continue_final_message,
            "image_text": image_text,
        }
        param = "chat_template" if of_request else "messages"
        try:
            source, message = template.encode(), _encoded(job)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the conversation cannot be passed to its chat template: {error}", param) from None
        queue = self._slow if of_request or len(message) > _QUICK_BYTES else self._quick
        return await queue.render(source, message, param)

    async def start(self, template: str) -> None:
        """Start the model's process and compile its template now, so that the first chat does not wait.

        Raises InvalidRequest with the template's error, Unavailable if the process does not start.
        """
        await self._quick.start()
        await self.render(template, None)

    async def close(self) -> None:
        """Kill both processes."""
        await asyncio.gather(self._quick.close(), self._slow.close())

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the living processes, the model's first."""
        return tuple(pid for queue in (self._quick, self._slow) if (pid := queue.pid) is not None)


def _encoded(job: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(job)
    except orjson.JSONEncodeError:  # orjson refuses integers beyond 64 bits, which arguments of calls may have
        return json.dumps(job, ensure_ascii=False).encode()
