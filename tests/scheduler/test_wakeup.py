"""A wait for a change: its deadlines on a virtual clock, and no timer left behind."""

import asyncio
from collections.abc import Callable

import pytest

from scheduler.wakeup import Wakeup
from tests.scheduler.virtual_time import virtual


def after(seconds: float) -> Callable[[], float]:
    """A fixed deadline after this many seconds."""
    deadline = asyncio.get_running_loop().time() + seconds
    return lambda: deadline


@virtual
async def test_each_wait_ends_at_its_own_deadline() -> None:
    wakeup, loop = Wakeup(), asyncio.get_running_loop()
    began = loop.time()
    for deadline_s in (5, 2, 9):
        start = loop.time()
        with pytest.raises(TimeoutError):
            await wakeup.wait(after(deadline_s))
        assert loop.time() - start == pytest.approx(deadline_s)

    loop.call_later(7, wakeup.set)
    await wakeup.wait(after(100))
    assert loop.time() - began == pytest.approx(23)


@virtual
async def test_a_deadline_that_moves_is_read_when_the_timer_fires() -> None:
    wakeup, loop = Wakeup(), asyncio.get_running_loop()
    deadlines = [loop.time() + seconds for seconds in (5, 8, 20)]
    loop.call_later(4, deadlines.pop, 0)
    loop.call_later(7, deadlines.pop, 0)
    began = loop.time()

    with pytest.raises(TimeoutError):
        await wakeup.wait(lambda: deadlines[0])

    assert loop.time() - began == pytest.approx(20)


@virtual
async def test_many_waits_share_one_timer_and_none_is_left() -> None:
    wakeup, loop = Wakeup(), asyncio.get_running_loop()
    timers = set[asyncio.TimerHandle | None]()
    for _ in range(50):
        loop.call_later(1, wakeup.set)
        await wakeup.wait(after(10))
        timers.add(wakeup._timer)
    wakeup.stop_timer()

    assert len(timers) <= 6
    assert wakeup._timer is None


@virtual
async def test_a_cancelled_wait_leaves_the_next_one_alone() -> None:
    wakeup = Wakeup()
    waiting = asyncio.ensure_future(wakeup.wait(after(10)))
    await asyncio.sleep(1)
    waiting.cancel()
    await asyncio.wait({waiting})
    loop = asyncio.get_running_loop()
    set_at = loop.time() + 2
    loop.call_at(set_at, wakeup.set)

    await wakeup.wait(after(10))

    assert loop.time() == set_at
