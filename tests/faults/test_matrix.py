"""Every failpoint with every action, in one process of a real cluster of two pairs."""

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.faults.cases import CASES, Case
from tests.faults.cluster import FaultCluster
from tests.faults.running import Measured, run_case

pytestmark = pytest.mark.cluster

RESULTS = "PDSERVE_FAULT_RESULTS"
"""A file's name here gets the measured table as JSON, for scripts/fault_table."""

OFTEN = frozenset({
    "prefill.in_chunk=raise", "prefill.in_chunk=kill9", "kv.send.mid@3=corrupt", "kv.before_ack=stop",
    "decode.token@5=kill9", "scheduler.between=kill9",
})  # fmt: skip
"""The cases that run every time: each action, each process, both sides of the first token."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    """Two P, two D and a scheduler."""
    with FaultCluster(tmp_path_factory.mktemp("faults")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def results() -> Iterator[list[Measured]]:
    """The measurements of the cases; written after the last has run, if requested."""
    measured: list[Measured] = []
    yield measured
    path = os.environ.get(RESULTS)
    if path and measured:
        Path(path).write_text(json.dumps([asdict(one) for one in measured], indent=1) + "\n")


def _case_param(case: Case) -> object:
    return pytest.param(case, id=str(case), marks=() if str(case) in OFTEN else pytest.mark.long)


@pytest.mark.parametrize("case", [_case_param(case) for case in CASES])
def test_a_fault_ends_every_request_as_guaranteed(cluster: FaultCluster, results: list[Measured], case: Case) -> None:
    cluster.renew(case.victim, case.setting)

    results.append(asyncio.run(run_case(cluster, case)))


@pytest.fixture(scope="module")
def tcp_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    """The same with KV over TCP alone."""
    with FaultCluster(tmp_path_factory.mktemp("tcp-faults"), flags=("--kv-transport=tcp",)) as cluster:
        yield cluster


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in CASES if case.point.startswith("kv.")], ids=str)
def test_a_fault_in_a_tcp_hand_off_ends_every_request_as_guaranteed(tcp_cluster: FaultCluster, case: Case) -> None:
    tcp_cluster.renew(case.victim, case.setting)

    asyncio.run(run_case(tcp_cluster, case))

    assert all("transport=shm" not in tcp_cluster.log(name) for name in tcp_cluster.guide.processes)


def test_the_cases_that_run_every_time_are_cases() -> None:
    assert {str(case) for case in CASES} >= OFTEN
