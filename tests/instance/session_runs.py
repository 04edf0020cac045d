"""Run one session with recording halves, and read its events."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from instance.session import InstanceSession
from wire.messages import Event, OpenSession

WAIT_S = 300.0


def run_session(test: Callable[[Any], Awaitable[None]], halves: Any, **options: Any) -> None:
    """Run a test with a session whose commands go to `halves`."""

    async def run() -> None:
        session = InstanceSession(OpenSession("s", 1, 1.0), halves, lambda _: None, lambda *_: None, **options)
        async with asyncio.timeout(WAIT_S):
            await test(session)

    asyncio.run(run())


async def next_event(session: InstanceSession) -> Event:
    """Return the session's next event, which comes alone."""
    async for events in session.events():
        (event,) = events
        return event
    raise AssertionError("the session is over")
