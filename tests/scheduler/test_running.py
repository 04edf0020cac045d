"""What a client reads of its request, and how it stops."""

import asyncio

import pytest

from scheduler.request import NewToken, PathEvent, PromptDone
from scheduler.running import Running
from tests.scheduler.virtual_time import virtual
from wire.errors import HandoffFailed, InternalError
from wire.types import FinishReason, StageTimes

DONE = PromptDone(0, "handoff", "", "p", "d", StageTimes())


def token(index: int, sequence: int = 0, finish: FinishReason | None = None) -> NewToken:
    return NewToken(0, sequence, index, 100 + index, finish)


async def read_all(running: Running) -> list[PathEvent]:
    return [event async for event in running.events()]


@virtual
async def test_what_was_put_before_an_error_is_read_first() -> None:
    running = Running()
    running.put(token(0))
    running.finish(HandoffFailed("lost"))
    events = aiter(running.events())

    assert await anext(events) == token(0)
    with pytest.raises(HandoffFailed, match="lost"):
        await anext(events)


@virtual
async def test_stop_replaces_all_that_is_unread_of_the_sequence_even_its_own_finish() -> None:
    running, stopped = Running(), []
    running.bind(cancel=lambda: None, stop=lambda prompt, sequence: stopped.append((prompt, sequence)))
    events = running.events()
    for event in (token(0), token(1), token(0, 1), token(2, finish=FinishReason.LENGTH)):
        running.put(event)
    running.put(token(1, 1, FinishReason.LENGTH))
    running.put(DONE)
    running.finish(None)

    assert await anext(aiter(events)) == token(0)
    running.stop_sequence(0, 0)
    running.stop_sequence(0, 0)
    rest = [event async for event in events]

    stop = NewToken(0, 0, 1, None, FinishReason.STOP)
    assert rest == [stop, token(0, 1), token(1, 1, FinishReason.LENGTH), DONE]
    assert stopped == [(0, 0)]


@virtual
async def test_stopping_a_sequence_whose_end_was_read_says_nothing_more() -> None:
    running = Running()
    running.put(token(0, finish=FinishReason.STOP))
    events = aiter(running.events())
    await anext(events)
    running.stop_sequence(0, 0)
    running.put(DONE)
    running.finish(None)

    assert [event async for event in events] == [DONE]


@virtual
async def test_leaving_early_cancels() -> None:
    running, cancelled = Running(), asyncio.Event()
    running.bind(cancel=cancelled.set, stop=lambda prompt, sequence: None)
    reader = asyncio.create_task(read_all(running))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait({reader})

    assert cancelled.is_set()


async def _reading(running: Running) -> tuple["asyncio.Task[list[PathEvent]]", list[PathEvent]]:
    seen: list[PathEvent] = []

    async def read() -> list[PathEvent]:
        async for event in running.events():
            seen.append(event)
        return seen

    task = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    return task, seen


def test_a_taker_gets_tokens_while_the_reader_waits_and_never_an_ending() -> None:
    async def run() -> None:
        running, taken = Running(), list[NewToken]()

        def take(event: NewToken) -> bool:
            taken.append(event)
            return True

        running.divert(take)
        running.put(token(0))  # nobody reads yet: it waits
        task, seen = await _reading(running)
        running.put(token(1))
        running.put(token(2, finish=FinishReason.LENGTH))
        running.put(token(3, 1))  # behind an ending that is not read yet
        running.finish(None)
        await task

        assert [event.index for event in taken] == [1]
        assert [event.index for event in seen if isinstance(event, NewToken)] == [0, 2, 3]

    asyncio.run(run())


def test_what_a_taker_leaves_is_read_in_order() -> None:
    async def run() -> None:
        running, order, is_free = Running(), list[int](), [True]

        def take(event: NewToken) -> bool:
            if is_free[0]:
                order.append(event.index)
            return is_free[0]

        running.divert(take)
        task, seen = await _reading(running)
        running.put(token(0))
        is_free[0] = False
        running.put(token(1))
        is_free[0] = True
        running.put(token(2))  # 1 is not read yet
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.put(token(3))
        running.finish(None)
        await task

        assert order == [0, 3]
        assert [event.index for event in seen if isinstance(event, NewToken)] == [1, 2]

    asyncio.run(run())


def test_a_taker_that_breaks_fails_its_request_alone() -> None:
    async def run() -> None:
        running, cancelled = Running(), list[bool]()
        running.bind(cancel=lambda: cancelled.append(True), stop=lambda prompt, sequence: None)

        def take(event: NewToken) -> bool:
            raise RuntimeError("broken")

        running.divert(take)
        task, _ = await _reading(running)
        running.put(token(0))
        with pytest.raises(InternalError, match="could not be sent"):
            await task

        assert cancelled

    asyncio.run(run())


def test_a_sequence_that_the_taker_stops_ends_behind_what_it_took() -> None:
    async def run() -> None:
        running = Running()

        def take(event: NewToken) -> bool:
            if event.index == 1:
                running.stop_sequence(0, 0)
            return True

        running.divert(take)
        task, seen = await _reading(running)
        for index in range(4):
            running.put(token(index))
        running.finish(None)
        await task

        assert seen == [NewToken(0, 0, 2, None, FinishReason.STOP)]

    asyncio.run(run())
