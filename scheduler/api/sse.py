"""Server-sent events, and detection of disconnected clients."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import Receive

from scheduler.http.exchange import Receiving
from wire.errors import Cancelled


class ClientGone(Cancelled):
    """The client of this response disconnected, or does not read it."""


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How one API writes its streams: the response headers, one object, a comment, and the end mark; empty if none."""

    headers: tuple[tuple[bytes, bytes], ...]
    frame: Callable[[Mapping[str, Any]], bytes]
    comment: bytes = b""
    end: bytes = b""


def event(body: Mapping[str, Any]) -> bytes:
    """Return one event that carries `body`."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


SSE = StreamFormat(
    (
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx would buffer the events
    ),
    event, comment=b": keep-alive\n\n", end=b"data: [DONE]\n\n",
)  # fmt: skip
"""OpenAI's format: server-sent events."""


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, None], kept_s: float = 0.0, on_gone: Callable[[], object] = bool
) -> None:
    """Run `work`; if the client disconnects first, let it run for `kept_s`, then cancel it and raise ClientGone.

    `on_gone` is called when the client disconnects and `work` may run on.
    """
    if isinstance(receive, Receiving):
        await _until_interrupted(receive, work, kept_s, on_gone)
    else:
        await _until_received(receive, work, kept_s, on_gone)


async def _until_interrupted(
    receive: Receiving, work: Coroutine[Any, Any, None], kept_s: float, on_gone: Callable[[], object]
) -> None:
    """Run `work`, unless the client is gone, in this task, which our server cancels when the client disconnects."""
    if receive.why_gone:  # cancelling work that never awaits would cancel what follows it
        work.close()
        raise ClientGone(receive.why_gone)
    task = asyncio.current_task()
    assert task is not None
    timers: list[asyncio.TimerHandle] = []

    def gone() -> None:
        if kept_s:
            on_gone()
            timers.append(asyncio.get_running_loop().call_later(kept_s, task.cancel))
        else:
            task.cancel()

    receive.when_gone(gone)
    try:
        await work
    except asyncio.CancelledError:
        if receive.why_gone and task.uncancel() == 0:
            raise ClientGone(receive.why_gone) from None
        raise
    finally:
        receive.when_gone(None)
        for timer in timers:
            timer.cancel()


async def _until_received(
    receive: Receive, work: Coroutine[Any, Any, None], kept_s: float, on_gone: Callable[[], object]
) -> None:
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and kept_s:
            on_gone()
            await asyncio.wait((working,), timeout=kept_s)
        if not working.done():
            raise ClientGone("the client disconnected")
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    working.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
