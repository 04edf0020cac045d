"""A session's reader when the session closes, when its task is cancelled, and when both happen."""

import asyncio
from typing import Any

import pytest

from rpc.grpc_connection import GrpcSession


class Call:
    """A stream whose read ends when the call is cancelled, as grpc.aio's does."""

    def __init__(self) -> None:
        self.reading = asyncio.Event()
        self._read: asyncio.Future[Any] | None = None

    async def read(self) -> Any:
        self._read = asyncio.get_running_loop().create_future()
        self.reading.set()
        return await self._read

    def cancel(self) -> None:
        if self._read is not None:
            self._read.cancel()


async def _events(session: GrpcSession) -> list[object]:
    return [event async for event in session.events()]


def test_a_task_cancelled_while_its_session_closes_is_cancelled() -> None:
    async def run() -> bool:
        call = Call()
        session = GrpcSession(call, "a:1")
        task = asyncio.create_task(_events(session))
        await call.reading.wait()
        task.cancel()
        await session.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        return task.cancelled()

    assert asyncio.run(run())


def test_a_session_closed_by_another_task_just_ends_its_events() -> None:
    async def run() -> list[object]:
        call = Call()
        session = GrpcSession(call, "a:1")
        task = asyncio.create_task(_events(session))
        await call.reading.wait()
        await session.close()
        return await task

    assert asyncio.run(run()) == []


def test_a_deadline_around_a_closed_sessions_read_is_kept() -> None:
    async def run() -> None:
        call = Call()
        session = GrpcSession(call, "a:1")

        async def late() -> None:
            async with asyncio.timeout(0.01):
                await _events(session)

        task = asyncio.create_task(late())
        await call.reading.wait()
        session._closed = True  # the close is under way, its cancel has not reached the read yet
        with pytest.raises(TimeoutError):
            await task

    asyncio.run(run())
