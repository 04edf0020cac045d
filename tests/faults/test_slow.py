"""A slow machine is not a dead one: processes that hardly run lose no session, no answer and no token."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.checkpoints.default_model import ensure_default_model
from pdserve.run_folder import default_cache_dir
from tests.cluster.guide import GuideCluster
from tests.faults.slow import Traffic, keep_busy, starve

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1200)]

STARVED_S = 120.0
START_S = 300.0
FOUND_S = 30.0  # at most 20 s of silence, of which the starved scheduler counts the time during which it could run
NUM_BUSY = 20
_LOST = re.compile(r"^\S+ WARNING .*instance_lost.*$", re.MULTILINE)
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
    everyone = [
        subprocess.Popen(
            [sys.executable, "-c", _BUSY, "torch" if number < 6 else "sum", sys.executable, str(folder / str(number))],
            start_new_session=True, cwd=Path(__file__).parents[2],
        )
        for number in range(NUM_BUSY)
    ]  # fmt: skip
    try:
        yield
    finally:
        for one in everyone:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def test_a_machine_with_twenty_busy_sessions_loses_nothing(
    cluster: GuideCluster, answers: dict[int, set[str]], tmp_path: Path
) -> None:
    logged = len(cluster.processes["scheduler"].log)

    with _busy_machine(tmp_path):
        traffic = asyncio.run(keep_busy(cluster.client.base_url, time.monotonic() + STARVED_S))

    _check(cluster, traffic, answers, logged)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_an_instance_that_is_really_gone_is_detected_meanwhile(number: signal.Signals, cluster: GuideCluster) -> None:
    victim, scheduler = cluster.processes["decode-0"], cluster.processes["scheduler"]
    logged = len(scheduler.log)

    victim.send(number)
    _until(lambda: bool(_LOST.search(scheduler.log, logged)), FOUND_S)

    victim.send(signal.SIGCONT)
    if number is signal.SIGKILL:
        cluster.kill("decode-0")
        cluster.start("decode-0")
    cluster.wait_ready(START_S)


def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.05)
