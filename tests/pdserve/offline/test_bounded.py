"""Bounded concurrency: the order of results, the bound, and the first error."""

import asyncio

import pytest

from pdserve.offline.bounded import bounded

pytestmark = pytest.mark.anyio


async def test_results_keep_their_order_within_the_concurrency_limit() -> None:
    running, peak = 0, 0

    async def work(item: int) -> int:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        for _ in range(item % 3):
            await asyncio.sleep(0)
        running -= 1
        return item * 10

    assert await bounded(range(20), work, 4) == [item * 10 for item in range(20)]
    assert peak == 4
    assert await bounded([], work, 4) == []


async def test_the_first_error_cancels_what_runs_and_starts_nothing_more() -> None:
    started: list[int] = []
    cancelled: list[int] = []

    async def work(item: int) -> None:
        started.append(item)
        if item == 1:
            raise ValueError("thing 1")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    with pytest.raises(ValueError, match="thing 1"):
        await bounded(range(100), work, 3)

    assert started == [0, 1, 2]
    assert sorted(cancelled) == [0, 2]
