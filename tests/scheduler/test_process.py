"""The scheduler process: how it starts, gives up and leaves nothing behind."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flags.options import EngineOptions
from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.process import serve_cluster
from scheduler.serving import Cluster
from tests.scheduler.fake_cluster import TABLE_DIGEST, FakeCluster
from wire.errors import ConfigError

pytestmark = pytest.mark.anyio
WAIT_S = 300.0
RENDERER = """
import asyncio
from scheduler.templates.templates import TemplateRenderer

async def main():
    renderer = TemplateRenderer()
    await renderer.start("")
    print(renderer.pids[0], flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def _config(folder: Path, **options: float) -> SchedulerConfig:
    return SchedulerConfig(EngineOptions(model=str(folder), port=0), SchedulerOptions(**options))  # type: ignore[arg-type]


def _cluster(roles: str) -> tuple[FakeCluster, Cluster]:
    fakes = FakeCluster(roles)
    return fakes, Cluster(tuple(fakes.expected), fakes.network.connect, TABLE_DIGEST)


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


async def test_a_cluster_never_ready_ends_naming_what_is_missing(model_folder: Path) -> None:
    fakes, cluster = _cluster("PD")
    fakes.boot(0)

    async with asyncio.timeout(WAIT_S):
        with pytest.raises(ConfigError, match=r"--startup-timeout 0.3 s; .*decode-0 at 10.0.0.1:8001"):
            await serve_cluster(_config(model_folder, startup_timeout=0.3), cluster)


async def test_the_template_process_lives_as_long_as_the_scheduler(model_folder: Path) -> None:
    before, stop = _children(), asyncio.Event()
    _, cluster = _cluster("PD")
    serving = asyncio.create_task(serve_cluster(_config(model_folder), cluster, stop))
    async with asyncio.timeout(WAIT_S):
        while _children() == before:  # noqa: ASYNC110 - another process's state has no event
            await asyncio.sleep(0.01)
        stop.set()
        await serving

    assert _children() == before


def test_the_template_process_ends_when_its_scheduler_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", RENDERER], stdout=subprocess.PIPE, text=True) as scheduler:
        assert scheduler.stdout is not None
        child = os.pidfd_open(int(scheduler.stdout.readline()))
        try:
            scheduler.send_signal(signal.SIGKILL)

            assert select.select([child], [], [], WAIT_S)[0]
        finally:
            os.close(child)
