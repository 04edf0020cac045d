"""Responses in the background on a cluster of processes: cancelled, shut down, killed, and found again."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.guide import GuideCluster

pytestmark = pytest.mark.long
WAIT_S = 60.0
LONG: Any = {"model": "tiny", "input": "hello", "background": True, "max_output_tokens": 400, "ignore_eos": True}


@pytest.fixture
def storing_cluster(tmp_path: Path, slow_fake_model: Path) -> Iterator[GuideCluster]:
    """1P1D on the slow fake engine, which stores responses."""
    flags = ("--engine=fake", f"--responses-store={tmp_path / 'kept'}", "--shutdown-timeout=1")
    with GuideCluster(tmp_path, slow_fake_model, flags=flags) as cluster:
        yield cluster.up()


def running(cluster: GuideCluster) -> str:
    """Return the id of a response that has its first token and holds blocks."""
    created = cluster.client.post("/v1/responses", LONG)
    assert created.status == 200, created.body
    response_id: str = created.json()["id"]
    until(cluster, response_id, "in_progress")
    assert any(sample.value for sample in cluster.gauge("pdserve_kv_blocks_used"))
    return response_id


def until(cluster: GuideCluster, response_id: str, status: str) -> Any:
    """Return the response once it has this status."""
    deadline = time.monotonic() + WAIT_S
    while (found := cluster.client.get(f"/v1/responses/{response_id}").json())["status"] != status:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


@pytest.mark.covers("B.responses.14")
def test_cancelling_frees_the_blocks(storing_cluster: GuideCluster) -> None:
    response_id = running(storing_cluster)

    cancelled = storing_cluster.client.post(f"/v1/responses/{response_id}/cancel", {})

    assert (cancelled.status, cancelled.json()["status"]) == (200, "cancelled")
    storing_cluster.wait_idle()


@pytest.mark.covers("B.responses.16")
def test_a_scheduler_that_stops_or_dies_leaves_failed_responses(storing_cluster: GuideCluster) -> None:
    first = running(storing_cluster)
    storing_cluster.kill("scheduler")
    storing_cluster.start("scheduler")
    storing_cluster.wait_ready()
    killed = until(storing_cluster, first, "failed")
    more = {"model": "tiny", "input": "again", "previous_response_id": first, "max_output_tokens": 2}
    assert storing_cluster.client.post("/v1/responses", more).status == 200
    storing_cluster.wait_idle()

    second = running(storing_cluster)
    storing_cluster.processes["scheduler"].send(signal.SIGTERM)
    assert storing_cluster.processes["scheduler"].wait() == 0
    storing_cluster.start("scheduler")
    storing_cluster.wait_ready()
    stopped = until(storing_cluster, second, "failed")

    assert killed["error"]["message"] == "the scheduler ended before this response: send the request again"
    assert stopped["error"]["message"] == "the server is shutting down"
    assert stopped["output"]
    storing_cluster.wait_idle()
