"""How a test makes a fake vLLM worker fail."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from aiohttp import web

from testing.vllm_worker.answer_body import error_body
from testing.vllm_worker.request import Leg

Action = Literal["hang", "die", "stop", "drop", "cut", "html", "unauthorized", "empty", "error", "recompute"]
Point = Literal["before", "during", "after", "read"]

ENDLESS = ("hang", "die", "drop")
"""Actions after which the worker sends nothing more."""
FAILED = error_body("Internal server error", "InternalServerError", 500)
_FOREVER_S = 3600.0  # how long a worker that hangs keeps its client
_HTML = "<!DOCTYPE html><html><body>502 Bad Gateway</body></html>"


@dataclass(slots=True)
class Fault:
    """The fault of the next `times` requests of a leg (of any leg, if None).

    `point`: before the answer starts; during the generation, once `after_tokens` of its tokens are out; after the last
    token, with the answer unfinished. Unless the action is error, recompute or one of ENDLESS, a stream that has begun
    ends there without an error and without [DONE]. At `read` the fault hits a decode worker that reads this worker's
    KV. With `recompute` vllm-ascend's decode worker gives up a sequence whose blocks others need
    (vllm_ascend.core.recompute_scheduler).
    """

    action: Action
    point: Point = "before"
    leg: Leg | None = None
    after_tokens: int = 0
    times: int = 1


class Faults:
    """Owner of the pending faults, in order. `die` ends the process (or the server in one), `stop` suspends it."""

    def __init__(self, die: Callable[[], None], stop: Callable[[], None]) -> None:
        self._die = die
        self._stop = stop
        self._next: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Queue a fault."""
        self._next.append(fault)

    def take(self, leg: Leg) -> Fault | None:
        """Return the fault for a request of this leg."""
        return self._take(lambda fault: fault.point != "read" and fault.leg in (None, leg))

    def take_read(self) -> Fault | None:
        """Return the fault for a read of KV."""
        return self._take(lambda fault: fault.point == "read")

    def _take(self, meets: Callable[[Fault], bool]) -> Fault | None:
        fault = next((one for one in self._next if one.times > 0 and meets(one)), None)
        if fault is not None:
            fault.times -= 1
        return fault

    async def crash(self, *, at_once: bool) -> web.Response:
        """Die from a reference that lacks a field, as vLLM 0.32 does: at once, or once the client gives up."""
        try:
            await asyncio.sleep(0 if at_once else _FOREVER_S)
        finally:
            self._die()
        await asyncio.sleep(_FOREVER_S)
        return web.Response()

    async def meet(self, fault: Fault, request: web.Request) -> web.Response:
        """Return the fault's answer, break the connection, or never return."""
        match fault.action:
            case "html":
                return web.Response(text=_HTML, content_type="text/html")
            case "unauthorized":
                return web.json_response({"error": "Unauthorized"}, status=401)
            case "error":
                return web.json_response(FAILED, status=500)
            case "empty" | "cut" | "recompute":
                return web.Response()
            case "die":
                self._die()
            case "stop":
                self._stop()
            case "drop" if request.transport is not None:
                request.transport.abort()
        await asyncio.sleep(_FOREVER_S)
        return web.Response()
