"""A scheduler process that is killed with a response in progress, and the next owner of its store."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.ports import free_ports
from scheduler.responses_store.sqlite_rows import INTERRUPTED
from scheduler.responses_store.sqlite_store import SqliteStore
from tests.scheduler.storing_server import LIMITS

pytestmark = pytest.mark.anyio

WAIT_S = 120.0
SCHEDULER = """
import asyncio, sys
from flags.options import EngineOptions
from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.process import serve_cluster
from scheduler.serving import Cluster
from tests.scheduler.fake_cluster import TABLE_DIGEST, FakeCluster

async def main(model, port, store, step_s):
    fakes = FakeCluster("PD")
    fakes.boot(0)
    fakes.boot(1).behaviour.step_s = float(step_s)
    cluster = Cluster(tuple(fakes.expected), fakes.network.connect, TABLE_DIGEST)
    options = SchedulerOptions(responses_store=store)
    await serve_cluster(SchedulerConfig(EngineOptions(model=model, port=int(port)), options), cluster)

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def scheduler(model: Path, port: int, store: Path, step_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """A scheduler process over fake instances, ready; a decode step takes `step_s`."""
    command = [sys.executable, "-c", SCHEDULER, str(model), str(port), str(store), str(step_s)]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}) as process:
        try:
            answer("GET", f"http://127.0.0.1:{port}/ready", lambda got: got.status_code == 200)
            yield process
        finally:
            process.kill()


def answer(method: str, url: str, until: Any, **body: Any) -> Any:
    """Return the first answer that `until` accepts."""
    deadline, last = time.monotonic() + WAIT_S, None
    while time.monotonic() < deadline:
        try:
            last = httpx.request(method, url, json=body or None, trust_env=False, timeout=WAIT_S)
        except httpx.TransportError:
            last = None
        if last is not None and until(last):
            return last.json()
        time.sleep(0.05)
    raise AssertionError(f"no such answer: {last and last.text}")


@pytest.mark.long
@pytest.mark.covers("B.responses.16")
async def test_what_a_killed_scheduler_generated_has_failed(model_folder: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url, path = f"http://127.0.0.1:{port}/v1/responses", tmp_path / "store"
    with scheduler(model_folder, port, path, 0.5) as process:
        created = answer("POST", url, lambda got: got.status_code == 200, input="hi", background=True)
        running = answer("GET", f"{url}/{created['id']}", lambda got: got.json()["status"] == "in_progress")
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)

    store = await SqliteStore.open(path, LIMITS)
    kept = await store.find(created["id"], "")
    await store.close()
    assert kept is not None
    assert json.loads(kept.response) == running | {"status": "failed", "error": INTERRUPTED}
    assert os.listdir(tmp_path) == ["store"]
