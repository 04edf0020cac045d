"""The chart's own words, run as processes over a fake API server: they become a cluster, and pods come and go."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ranktable_tools.kube.names import TABLE_KEY
from tests.deploy.kube_processes import KubeProcesses, kube_processes
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model, save_tiny_tokenizer

REQUEST = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}


def _fake_model(folder: Path) -> Path:
    """A folder for the fake engine: a tokenizer and no weights."""
    save_tiny_tokenizer(folder)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _hosts(cluster: KubeProcesses) -> list[list[str]]:
    groups = json.loads(cluster.kube.data("pdserve-ranktable")[TABLE_KEY])["server_group_list"]
    return [[server["server_ip"] for server in group["server_list"]] for group in groups]


def _health(address: str) -> int:
    """Ask as a kubelet's gRPC probe does: no certificate, no secret, the whole server."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        status: int = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=10).status
        return status


@pytest.mark.cluster
@pytest.mark.parametrize("engine", ["fake", pytest.param("torch", marks=pytest.mark.long)])
def test_pods_find_each_other_serve_and_come_and_go(tmp_path: Path, engine: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = _fake_model(folder) if engine == "fake" else make_tiny_model("llama", folder)
    flags = (
        ("--engine=fake",) if engine == "fake" else ("--dtype=float32", "--kv-cache-memory=16MiB", "--block-size=16")
    )
    with kube_processes(tmp_path, model, flags) as cluster:
        cluster.run_pod("table-writer-0", "table-writer", "127.0.0.9")
        cluster.run_pod("scheduler-0", "scheduler", "127.0.0.1")
        cluster.run_pod("prefill-0", "prefill", "127.0.0.2")
        cluster.run_pod("decode-0", "decode", "127.0.0.3")
        cluster.wait_ready()
        answers = [cluster.client.post("/v1/completions", REQUEST)]
        serving = {_health(f"127.0.0.{host}:{cluster.grpc_port}") for host in (2, 3)}

        cluster.run_pod("decode-1", "decode", "127.0.0.4")
        cluster.wait_for_instances("prefill-0", "decode-0", "decode-1")
        grown = _hosts(cluster)
        said = cluster.delete_pod("decode-0")
        cluster.wait_for_instances("prefill-0", "decode-1")
        answers += [cluster.client.post("/v1/completions", REQUEST) for _ in range(3)]
        shrunk, parts = _hosts(cluster), set(cluster.kube.data("pdserve-parts"))

    assert [answer.status for answer in answers] == [200] * 4, answers[-1].body
    # The fake engine's tokens show which instance made them, the real one's are the same everywhere.
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert [text == texts[0] for text in texts] == [True, *[engine == "torch"] * 3]
    assert len(set(texts[1:])) == 1
    assert serving == {health_pb2.HealthCheckResponse.SERVING}
    assert grown == [["127.0.0.1"], ["127.0.0.2"], ["127.0.0.3", "127.0.0.4"]]
    assert shrunk == [["127.0.0.1"], ["127.0.0.2"], ["127.0.0.4"]]
    assert parts == {"scheduler-0", "prefill-0", "decode-1"}
    assert said.startswith(("no work is left", "the instance has ended"))
    assert {status for _, _, status in cluster.kube.calls} <= {200, 409}
