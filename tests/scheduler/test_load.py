"""More requests than the queue holds, over many connections: each is answered or told to come back later."""

import asyncio
from pathlib import Path

import pytest

from tests.scheduler.load_client import ask_all, status_of
from tests.scheduler.load_cluster import HOST, Serving, serving

pytestmark = [pytest.mark.anyio, pytest.mark.cluster]

QUIET_S = 60.0
PROMPT = "the quick brown fox jumps over the lazy dog " * 5


async def _load(model: Path, folder: Path, *, num_requests: int, num_connections: int, queued: int) -> None:
    """Ask more than the queue holds; the limits are the project's promise."""
    body = {"model": str(model), "prompt": PROMPT, "max_tokens": 3}
    async with serving(folder, model, "--max-queued-requests", str(queued), "--log-level", "INFO") as scheduler:
        await ask_all(scheduler.port, num_requests=4, num_connections=2, body=body)
        before_mib = scheduler.memory_mib()
        endings = await ask_all(scheduler.port, num_requests=num_requests, num_connections=num_connections, body=body)
        await _wait_small(scheduler, before_mib + 100)

        assert set(endings) <= {"200", "429"}, endings
        assert sum(endings.values()) == num_requests
        assert endings["200"] >= queued
        assert endings["429"] > 0
        assert scheduler.memory_mib("VmHWM") < 1024
        assert await status_of(HOST, scheduler.port, "/ready") == 200


async def _wait_small(scheduler: Serving, limit_mib: float) -> None:
    """Wait until the scheduler has given its memory back."""
    async with asyncio.timeout(QUIET_S):
        while scheduler.memory_mib() > limit_mib:  # noqa: ASYNC110 - another process's memory has no event
            await asyncio.sleep(0.1)


async def test_hundreds_of_requests_more_than_the_queue_holds(model_folder: Path, tmp_path: Path) -> None:
    await _load(model_folder, tmp_path, num_requests=500, num_connections=200, queued=50)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_ten_thousand_requests_over_two_thousand_connections(model_folder: Path, tmp_path: Path) -> None:
    await _load(model_folder, tmp_path, num_requests=10_000, num_connections=2_000, queued=500)
