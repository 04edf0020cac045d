"""Send each request of a load when it is due, with a limit on concurrent requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

from pdserve.bench.load.load_request import LoadRequest
from pdserve.bench.load.record import LoadRecord
from pdserve.bench.load.timeline import Timeline


class Send(Protocol):
    """Sends one request, due at a time on the run's clock; `number` counts from 0."""

    async def __call__(self, number: int, request: LoadRequest, due_s: float) -> Timeline:
        """Return its timeline, failed or not."""
        ...


def _do_nothing(record: LoadRecord) -> None:
    pass


async def drive(
    requests: Sequence[LoadRequest], times_s: Sequence[float], send: Send, record: LoadRecord, *,
    clock: Callable[[], float],
    max_concurrency: int | None = None, seen: Callable[[LoadRecord], None] = _do_nothing,
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
) -> None:  # fmt: skip
    """Send `requests` at `times_s` after now; return when all have ended. `seen` is called after each.

    Cancelling this coroutine cancels the requests in progress; `record` keeps those that have ended.
    """
    places = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def one(number: int, request: LoadRequest, due_s: float) -> None:
        async with _place(places):
            record.start(number, clock())
            line = await send(number, request, due_s)
        record.add(number, line, clock())
        seen(record)

    record.begin(clock())
    async with asyncio.TaskGroup() as tasks:
        for number, (request, at_s) in enumerate(zip(requests, times_s, strict=True)):
            wait_s = record.began_s + at_s - clock()
            if wait_s > 0:
                await sleep(wait_s)
            tasks.create_task(one(number, request, record.began_s + at_s))


@contextlib.asynccontextmanager
async def _place(places: asyncio.Semaphore | None) -> AsyncIterator[None]:
    if places is None:
        yield
        return
    async with places:
        yield
