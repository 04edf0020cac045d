"""The scheduler's event loop: its clock is precise enough to measure latencies."""

import asyncio
import gc
import time

import pytest

from scheduler import loop
from scheduler.loop import run


def test_the_loops_clock_advances_within_an_iteration() -> None:
    async def ticks() -> tuple[float, float]:
        running = asyncio.get_running_loop()
        before, began = running.time(), time.monotonic()
        while time.monotonic() - began < 0.0002:
            pass
        return running.time() - before, running.time() - time.monotonic()

    elapsed, offset = run(ticks())

    assert elapsed >= 0.0002
    assert abs(offset) < 1.0, "it is the clock of time.monotonic"


def test_garbage_collection_is_rare_while_the_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "gc", gc)

    async def thresholds() -> tuple[int, int, int]:
        return gc.get_threshold()

    before = gc.get_threshold()
    inside = run(thresholds())

    frozen = gc.get_freeze_count()
    gc.freeze()  # for the tests that follow
    assert inside[0] > before[0]
    assert (gc.get_threshold(), frozen) == (before, 0)
