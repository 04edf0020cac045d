"""The guide over three hosts, in network namespaces: `ranktable gen` on each, one merge, start_servers.sh."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.client import Client
from pdserve.readiness import check_ready
from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.host_cluster import GUIDE_MERGE, MERGE, HostCluster
from tests.cluster.hosts import obstacle

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle()),
]


def _bodies() -> Iterator[dict[str, object]]:
    """Yield 20 requests: greedy, seeded, truncated sampling, several choices; prompts of 1 to 96 tokens."""
    for number in range(20):
        sampling: dict[str, object] = {"temperature": 0} if number % 2 else {"temperature": 1.1, "seed": number}
        if number % 5 == 4:
            sampling |= {"top_k": 20, "top_p": 0.9}
        if number % 6 == 2:
            sampling |= {"n": 2, "stop": ["the"]}
        prompt = [3 + (7 * number + 5 * at) % 200 for at in range(1 + 5 * number)]
        yield {"model": "tiny", "prompt": prompt, "max_tokens": 12, "ignore_eos": True, **sampling}


def _choices(client: Client, body: dict[str, object]) -> list[tuple[str, str, str | None]]:
    reply = client.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    choices = reply.json()["choices"]
    return [(one["text"], one["finish_reason"], one["stop_reason"]) for one in choices]


@contextmanager
def _combined(cluster: HostCluster, model: Path) -> Iterator[Client]:
    """One process with the whole model, on the clients' host."""
    flags = ("--served-model-name", "tiny", *ENGINE_FLAGS)
    command = [sys.executable, "-P", "-m", "pdserve", "serve", str(model), "--port=8000", *flags]
    client = Client("http://127.0.0.1:8000", timeout_s=300.0)
    with (cluster.folder / "combined.log").open("wb") as log, subprocess.Popen(
        [*cluster.network.hosts["clients"].before, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
    ) as server:  # fmt: skip
        try:
            cluster.wait("ready", lambda: server.poll() is not None or check_ready(client)[0])
            assert server.poll() is None, (cluster.folder / "combined.log").read_text()
            yield client
        finally:
            server.kill()


@pytest.mark.parametrize(("tool", "trust"), [(GUIDE_MERGE, "addresses"), (MERGE, "secret")], ids=["guide", "ranktable"])
def test_three_merged_hosts_answer_as_one_process_does(
    tmp_path: Path, tiny_model: Path, tool: Sequence[str], trust: str
) -> None:
    with HostCluster(tmp_path, tiny_model, (*ENGINE_FLAGS, "--prefill-chunk-size=32")) as cluster:
        cluster.generate()
        output = cluster.merge(*tool)
        cluster.up()
        with _combined(cluster, tiny_model) as combined, cluster.as_client() as client:
            for body in _bodies():
                assert _choices(client, body) == _choices(combined, body), body
        (moved,) = cluster.gauge("pdserve_kv_handoff_bytes_total")
        (link,) = cluster.gauge("pdserve_link_up")
        logs = {name: process.log for name, process in cluster.processes.items()}

    assert "Merge 3 global ranktable successful." in output
    assert moved.value > 0
    assert (link.labels["transport"], link.value) == ("tcp", 1.0)
    warned = {name for name, log in logs.items() if "no_cluster_secret" in log}
    assert warned == ({"scheduler"} if trust == "addresses" else set())
