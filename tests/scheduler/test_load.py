"""More requests than the queue holds, over many connections: each is answered or gets a Retry-After."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.scheduler.load_client import request_all, status_of
from tests.scheduler.load_cluster import HOST, Serving, serving

pytestmark = [pytest.mark.anyio, pytest.mark.cluster]

QUIET_S = 300.0
PROMPT = "the quick brown fox jumps over the lazy dog " * 5


async def _load(scheduler: Serving, body: dict[str, object], **load: int | str) -> Counter[str]:
    """Send more requests than the queue holds; return the counts of outcomes. The limits are documented promises."""
    before_mib = scheduler.memory_mib()
    endings = await request_all(scheduler.port, body=body, **load)  # type: ignore[arg-type]
    await _wait_small(scheduler, before_mib + 100)

    assert set(endings) <= {"200", "429"}, endings
    assert endings.total() == load["num_requests"]
    assert endings["429"] > 0
    assert scheduler.memory_mib("VmHWM") < 1024
    assert await status_of(HOST, scheduler.port, "/ready") == 200
    return endings


async def _wait_small(scheduler: Serving, limit_mib: float) -> None:
    """Wait until the scheduler has returned its memory."""
    async with asyncio.timeout(QUIET_S):
        while scheduler.memory_mib() > limit_mib:  # noqa: ASYNC110 - another process's memory has no event
            await asyncio.sleep(0.1)


@pytest.mark.long
async def test_one_key_flooding_the_queue_blocks_no_other(model_folder: Path, tmp_path: Path) -> None:
    body: dict[str, object] = {"model": str(model_folder), "prompt": PROMPT, "max_tokens": 3}
    flags = ("--max-queued-requests", "50", "--api-key", "busy", "--api-key", "quiet")
    async with serving(tmp_path, model_folder, *flags) as scheduler:
        await request_all(scheduler.port, num_requests=4, num_connections=2, body=body, key="quiet")
        busy = asyncio.create_task(_load(scheduler, body, num_requests=500, num_connections=200, key="busy"))
        quiet = await request_all(scheduler.port, num_requests=10, num_connections=1, body=body, key="quiet")

        assert quiet == {"200": 10}
        assert (await busy)["200"] >= 25


@pytest.mark.long
async def test_ten_thousand_requests_over_two_thousand_connections(model_folder: Path, tmp_path: Path) -> None:
    body: dict[str, object] = {"model": str(model_folder), "prompt": PROMPT, "max_tokens": 3}
    async with serving(tmp_path, model_folder, "--max-queued-requests", "500") as scheduler:
        await request_all(scheduler.port, num_requests=4, num_connections=2, body=body)
        endings = await _load(scheduler, body, num_requests=10_000, num_connections=2_000)

    assert endings["200"] >= 500
