"""The loop that serves: its clock, with which latencies can be measured, and the open files it may have."""

import asyncio
import resource
import time
from collections.abc import Iterator

import pytest

from scheduler.loop import raise_file_limit, run


def test_its_clock_goes_on_within_a_turn_and_by_less_than_a_millisecond() -> None:
    async def ticks() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        before, began = loop.time(), time.monotonic()
        while time.monotonic() - began < 0.0002:
            pass
        return loop.time() - before, loop.time() - time.monotonic()

    gone, apart = run(ticks())

    assert gone >= 0.0002
    assert abs(apart) < 1.0, "it is the clock of time.monotonic"


@pytest.fixture
def _files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_files")
def test_the_limit_of_open_files_is_raised_to_the_hard_one_and_never_lowered() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))

    assert raise_file_limit(512) == 512
    assert raise_file_limit(300) == 512
    assert raise_file_limit(10**9) == hard or hard == resource.RLIM_INFINITY
