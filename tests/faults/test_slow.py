"""A slow machine is not a dead one: processes that hardly run lose no session, no answer and no token."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.checkpoints.default_model import ensure_default_model
from pdserve.run_folder import default_cache_dir
from tests.cluster.guide import GuideCluster
from tests.faults.slow import RUNNING_S, Traffic, keep_busy, starve

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1200)]

STARVED_S = 120.0
START_S = 300.0
KILL_FOUND_S = 5.0
STOP_FOUND_S = 60.0  # by the wall, at any load: what counts is the scheduler's own measure, as below
MAX_SILENCE_S, LATE_S = 20.0, 2.0  # the longest limit, of one that was slow before; and how late it is noticed
NUM_BUSY = 20
_LOST = re.compile(r"^\S+ WARNING .*instance_lost.*$", re.MULTILINE)
_SILENT = re.compile(r"no message for ([\d.]+) s \(limit ([\d.]+) s\)")
_BUSY = """
import os, subprocess, sys
while True:
    if sys.argv[1] == "torch":
        subprocess.run([sys.executable, "-c", "import torch, transformers"], check=False)
        subprocess.run([sys.argv[2], "-m", "native.build"], check=False, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL, env={**os.environ, "PDSERVE_CACHE_DIR": sys.argv[3]})
        subprocess.run(["rm", "-rf", sys.argv[3]], check=False)
    else:
        sum(range(1_000_000))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuideCluster]:
    """A prefill instance, a decode instance of two ranks and a scheduler, the real model, clients' limits tenfold."""
    folder = tmp_path_factory.mktemp("slow")
    flags = ("--dtype=float32", "--stall-timeout=100", "--first-token-timeout=1200")
    model = ensure_default_model(default_cache_dir(os.environ), lambda words: None)
    with GuideCluster(folder, model, prefill=("0",), decode=("1,2",), flags=flags) as cluster:
        cluster.start()
        cluster.wait_ready(START_S)
        yield cluster


@pytest.fixture(scope="module")
def answers(cluster: GuideCluster) -> dict[int, set[str]]:
    """The clients' answers without starvation."""
    return asyncio.run(keep_busy(cluster.client.base_url, time.monotonic())).answers


def _check(cluster: GuideCluster, traffic: Traffic, answers: dict[int, set[str]], logged: int) -> None:
    assert not traffic.failures
    assert traffic.num_answers > 0
    assert all(texts == answers[length] for length, texts in traffic.answers.items())
    assert not _LOST.findall(cluster.processes["scheduler"].log[logged:])
    cluster.wait_idle(START_S)


def _pids(cluster: GuideCluster, victim: str) -> list[int]:
    """Return the process of an instance or the scheduler, or those of its ranks other than 0."""
    name, _, ranks = victim.partition("'s ")
    process = cluster.processes[name]
    return [child.pid for child in process.descendants()] if ranks else [process.pid]


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "decode-0's rank 1", "scheduler"])
def test_a_process_that_runs_a_tenth_of_the_time_loses_nothing(
    victim: str, cluster: GuideCluster, answers: dict[int, set[str]]
) -> None:
    async def run() -> Traffic:
        until_s = time.monotonic() + STARVED_S
        starving = asyncio.create_task(starve(_pids(cluster, victim), until_s))
        traffic = await keep_busy(cluster.client.base_url, until_s)
        await starving
        return traffic

    logged = len(cluster.processes["scheduler"].log)

    traffic = asyncio.run(run())

    _check(cluster, traffic, answers, logged)


@contextmanager
def _busy_machine(folder: Path) -> Iterator[None]:
    """Run twenty busy sessions, of which six import torch and compile C again and again."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _BUSY, "torch" if number < 6 else "sum", sys.executable, str(folder / str(number))],
            start_new_session=True, cwd=Path(__file__).parents[2],
        )
        for number in range(NUM_BUSY)
    ]  # fmt: skip
    try:
        yield
    finally:
        for one in processes:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def test_a_machine_with_twenty_busy_sessions_loses_nothing(
    cluster: GuideCluster, answers: dict[int, set[str]], tmp_path: Path
) -> None:
    logged = len(cluster.processes["scheduler"].log)

    with _busy_machine(tmp_path):
        traffic = asyncio.run(keep_busy(cluster.client.base_url, time.monotonic() + STARVED_S))

    _check(cluster, traffic, answers, logged)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_instance_that_is_gone_is_found_while_another_is_slow(number: signal.Signals, cluster: GuideCluster) -> None:
    victim, scheduler = cluster.processes["decode-0"], cluster.processes["scheduler"]

    async def run() -> list[str]:
        until_s = time.monotonic() + STARVED_S
        starving = asyncio.create_task(starve(_pids(cluster, "prefill-0"), until_s))
        clients = asyncio.create_task(keep_busy(cluster.client.base_url, until_s))
        while not _num_in_flight(cluster):  # noqa: ASYNC110 - another process's count has no event
            await asyncio.sleep(RUNNING_S)
        logged = len(scheduler.log)
        victim.send(number)
        deadline = time.monotonic() + (KILL_FOUND_S if number is signal.SIGKILL else STOP_FOUND_S)
        while not (lost := _LOST.findall(scheduler.log[logged:])) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(RUNNING_S)
        for task in (clients, starving):
            task.cancel()
        await asyncio.gather(clients, starving, return_exceptions=True)
        return lost

    lost = asyncio.run(run())

    victim.send(signal.SIGCONT)
    if number is signal.SIGKILL:
        cluster.kill("decode-0")
        cluster.start("decode-0")
    cluster.wait_ready(START_S)
    assert lost, "it was not found"
    assert all("decode-0" in line for line in lost), "the slow one is not lost"
    silent = _SILENT.search(lost[0])
    assert (silent is None) == (number is signal.SIGKILL), lost[0]
    if silent is not None:
        silent_s, limit_s = map(float, silent.groups())
        assert silent_s <= limit_s + LATE_S
        assert limit_s <= MAX_SILENCE_S


def _num_in_flight(cluster: GuideCluster) -> float:
    return sum(sample.value for sample in cluster.gauge("pdserve_requests_inflight"))
