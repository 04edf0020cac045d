"""`pdserve links`, `status --url` and `verify --base-url` on clusters of real processes, as in the guide."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.guide import GuideCluster
from tests.kvtransfer.every_transport import MOONCAKE
from wire.errors import Unavailable

pytestmark = pytest.mark.cluster


def _pdserve(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "pdserve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)


def _links(cluster: GuideCluster, mib: int = 8) -> list[dict[str, Any]]:
    done = _pdserve("links", "--url", cluster.client.base_url, "--mib", str(mib), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    links: list[dict[str, Any]] = json.loads(done.stdout)["links"]
    return links


def _received_bytes(cluster: GuideCluster) -> float:
    return max(sample.value for sample in cluster.gauge("pdserve_kv_bytes_received_total"))


def _status_of_link_up(cluster: GuideCluster, transport: str) -> str:
    """Return the output of `pdserve status`, once the instance's next heartbeat has reported its link."""
    deadline = time.monotonic() + 300.0
    while [(one.labels["transport"], one.value) for one in cluster.gauge("pdserve_link_up")] != [(transport, 1.0)]:
        assert time.monotonic() < deadline, cluster.gauge("pdserve_link_up")
        time.sleep(0.02)
    status = _pdserve("status", "--url", cluster.client.base_url)
    assert status.returncode == 0, status.stderr
    return status.stdout


def test_the_link_is_measured_and_its_bytes_reach_no_pool(fake_cluster: GuideCluster) -> None:
    before = _received_bytes(fake_cluster)
    (link,) = _links(fake_cluster)

    assert (link["transport"], link["state"], link["passed_over"], link["error"]) == ("shm", "up", [], "")
    assert link["round_trip_s"] > 0
    assert link["bytes_per_s"] > 0
    assert _received_bytes(fake_cluster) < before + 2**20, "the measurement was counted as KV"
    fake_cluster.wait_idle()
    reply = fake_cluster.client.post("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 4})
    assert reply.status == 200, reply.body
    pair = {"prefill-0": link["prefill_address"], "decode-0": link["decode_address"]}
    status = _status_of_link_up(fake_cluster, "shm")
    assert [line.split()[:3] for line in status.splitlines()[2:]] == [
        [name, name[:-2], address] for name, address in pair.items()
    ]
    assert "shm to decode-0 up" in status
    (moved,) = fake_cluster.gauge("pdserve_kv_handoff_bytes_total")
    (early,) = fake_cluster.gauge("pdserve_kv_handoff_early_bytes_total")
    assert 0 <= early.value <= moved.value
    assert moved.value > 0


@pytest.mark.long
def test_a_transport_missing_on_one_side_is_named_with_the_reason(tmp_path: Path, fake_model: Path) -> None:
    with GuideCluster(tmp_path, fake_model, flags=("--engine=fake",)) as cluster:
        cluster.start("decode-0", flags=("--kv-transport", "tcp"))
        cluster.start("prefill-0", "scheduler")
        cluster.wait_ready()

        (link,) = _links(cluster)
        status = _status_of_link_up(cluster, "tcp")

    assert (link["transport"], link["state"]) == ("tcp", "up")
    assert [text.partition(":")[0] for text in link["passed_over"]] == ["shm"]
    assert f"tcp to decode-0 up (not {link['passed_over'][0][:40]}" in status


def test_two_endpoints_are_compared_by_tokens_and_log_probabilities(fake_cluster: GuideCluster) -> None:
    url = fake_cluster.client.base_url
    done = _pdserve("verify", "--base-url", url, "--reference", url, "--prompts", "3", "--max-tokens", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "3 of 3 prompts equal; log probabilities at most 0 apart (limit 0.25)"
    nobody = _pdserve("verify", "--base-url", url, "--reference", "http://127.0.0.1:9")
    assert nobody.returncode == 1
    assert "http://127.0.0.1:9 does not answer" in nobody.stderr


@pytest.mark.long
@MOONCAKE
def test_mooncake_is_measured_and_both_rates_are_shown(tmp_path: Path, fake_model: Path) -> None:
    both = {"mooncake", "tcp"}
    with GuideCluster(tmp_path, fake_model, flags=("--engine=fake", "--kv-transport", *both)) as cluster:
        cluster.start("decode-0", "prefill-0", "scheduler")
        cluster.wait_ready()
        deadline = time.monotonic() + 300.0
        while "slower than " not in str((link := _links(cluster, mib=0)[0])["passed_over"]):
            assert time.monotonic() < deadline, link
        (measured,) = _links(cluster)
        reply = cluster.client.post("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 4})
        status = _status_of_link_up(cluster, link["transport"])

    (slower,) = both - {link["transport"]}
    assert link["passed_over"][0].startswith(f"{slower}: slower than {link['transport']} (")
    assert link["passed_over"][0].count(" GB/s") == 2
    assert measured["transport"] == link["transport"]
    assert _without_rates(measured) == _without_rates(link)  # a link that was lost in between is measured again
    assert reply.status == 200, reply.body
    assert f"(not {slower}: slower than {link['transport']})" in status


@pytest.mark.long
def test_a_pair_without_a_common_transport_is_reported_then_serves(tmp_path: Path, fake_model: Path) -> None:
    mismatch = "prefill-0 has shm and decode-0 has tcp"
    with GuideCluster(tmp_path, fake_model, flags=("--engine=fake",)) as cluster:
        cluster.start("decode-0", flags=("--kv-transport", "tcp"))
        cluster.start("prefill-0", flags=("--kv-transport", "shm"))
        scheduler = cluster.start("scheduler")
        deadline = time.monotonic() + 300.0
        while not (gap := cluster.gauge("pdserve_link_impossible") if _scheduler_answers(cluster) else []):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        reply = cluster.client.post("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 4})
        ready = cluster.client.get("/ready")
        status, links = (_pdserve(one, "--url", cluster.client.base_url) for one in ("status", "links"))
        cluster.processes["decode-0"].send(signal.SIGTERM)
        cluster.processes["decode-0"].wait()
        cluster.start("decode-0", flags=("--kv-transport", "tcp", "shm"))
        cluster.wait_ready()
        (link,) = _links(cluster)

        assert len(gap) == 1
        assert (reply.status, ready.status, status.returncode, links.returncode) == (503, 503, 1, 1)
        for reported in (reply.body, ready.body, status.stdout.encode(), links.stdout.encode()):
            assert mismatch.encode() in reported
        assert scheduler.log.count("no_kv_transport ") == 1
        assert scheduler.log.count("kv_transport_found ") == 1
        assert (link["transport"], link["state"], link["error"]) == ("shm", "up", "")


def _scheduler_answers(cluster: GuideCluster) -> bool:
    """Whether its HTTP API is up."""
    try:
        return cluster.client.get("/health").status == 200
    except Unavailable:
        return False


def _without_rates(link: dict[str, Any]) -> list[str]:
    return [re.sub(r"[\d.]+ GB/s", "a rate", why) for why in link["passed_over"]]
