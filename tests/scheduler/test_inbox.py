"""One prompt's queue of arrivals: its order, its deadlines on a virtual clock, and no timer left behind."""

import asyncio

import pytest

from scheduler.inbox import Arrival, Inbox, Stopped
from tests.scheduler.virtual_time import virtual

ONE, TWO = Arrival(None, Stopped()), Arrival(None, Stopped())


@virtual
async def test_arrivals_are_read_in_order_without_waiting() -> None:
    inbox, loop = Inbox(), asyncio.get_running_loop()
    inbox.put_nowait(ONE)
    inbox.put_nowait(TWO)

    assert not inbox.empty()
    assert await inbox.get(loop.time() - 1) is ONE
    assert await inbox.get(loop.time() + 1) is TWO
    assert inbox.empty()


@virtual
async def test_each_wait_ends_at_its_own_deadline_sooner_or_later_than_the_last() -> None:
    inbox, loop = Inbox(), asyncio.get_running_loop()
    began = loop.time()
    for deadline_s in (5, 2, 9):
        start = loop.time()
        with pytest.raises(TimeoutError):
            await inbox.get(start + deadline_s)
        assert loop.time() - start == pytest.approx(deadline_s)

    loop.call_later(7, inbox.put_nowait, ONE)
    assert await inbox.get(loop.time() + 100) is ONE
    assert loop.time() - began == pytest.approx(23)


@virtual
async def test_many_arrivals_share_one_timer_and_none_is_left() -> None:
    inbox, loop = Inbox(), asyncio.get_running_loop()
    timers = set[asyncio.TimerHandle | None]()
    for _ in range(50):
        loop.call_later(1, inbox.put_nowait, ONE)
        await inbox.get(loop.time() + 10)
        timers.add(inbox._timer)
    inbox.rest()

    assert len(timers) <= 6
    assert inbox._timer is None


@virtual
async def test_a_wait_that_is_cancelled_loses_nothing() -> None:
    inbox, loop = Inbox(), asyncio.get_running_loop()
    waiting = asyncio.ensure_future(inbox.get(loop.time() + 10))
    await asyncio.sleep(1)
    waiting.cancel()
    await asyncio.wait({waiting})
    inbox.put_nowait(ONE)

    assert await inbox.get(loop.time() + 10) is ONE
