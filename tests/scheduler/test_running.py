"""What a client reads of its request, and how it stops."""

import asyncio

import pytest

from scheduler.request import NewToken, PathEvent, PromptDone
from scheduler.running import Running
from tests.scheduler.virtual_time import virtual
from wire.errors import HandoffFailed
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
