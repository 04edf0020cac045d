"""The chart's own commands, run as processes over a fake API server: they form a cluster, and pods come and go."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ranktable_tools.kube.names import TABLE_KEY
from tests.deploy.kube_processes import KubeProcesses, kube_processes
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model, save_tiny_tokenizer
from tests.ranktable_tools.documents import device, group, grouped, server

REQUEST = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}


def _fake_model(folder: Path) -> Path:
    """A folder for the fake engine: a tokenizer and no weights."""
    save_tiny_tokenizer(folder)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "fake.json").write_text(json.dumps({"step_seconds": 0.01}))
    return folder


def _hosts(cluster: KubeProcesses) -> list[list[str]]:
    groups = json.loads(cluster.kube.data("pdserve-ranktable")[TABLE_KEY])["server_group_list"]
    return [[server["server_ip"] for server in group["server_list"]] for group in groups]


def _health(address: str) -> int:
    """Call as a kubelet's gRPC probe does: no certificate, no secret, the whole server."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        status: int = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=10).status
        return status


@pytest.mark.cluster
@pytest.mark.long  # tests/deploy/test_compose.py serves every time
@pytest.mark.parametrize("engine", ["fake", "torch"])
def test_pods_find_each_other_serve_and_come_and_go(tmp_path: Path, engine: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = _fake_model(folder) if engine == "fake" else make_tiny_model("llama", folder)
    flags = (
        ("--engine=fake",) if engine == "fake" else ("--dtype=float32", "--kv-cache-memory=16MiB", "--block-size=16")
    )
    with kube_processes(tmp_path, model, flags) as cluster:
        _start_one_each(cluster)
        answers = [cluster.client.post("/v1/completions", REQUEST)]
        serving = {_health(f"127.0.0.{host}:{cluster.grpc_port}") for host in (2, 3)}

        cluster.run_pod("decode-1", "decode", "127.0.0.4")
        cluster.wait_for_instances("prefill-0", "decode-0", "decode-1")
        grown = _hosts(cluster)
        hook_output = cluster.delete_pod("decode-0")
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
    assert hook_output.startswith(("no work is left", "the instance has exited"))
    assert {status for _, _, status in cluster.kube.calls} <= {200, 409}


@pytest.mark.cluster
@pytest.mark.long
def test_a_pod_that_is_deleted_under_load_ends_no_request(tmp_path: Path) -> None:
    wanted = REQUEST | {"max_tokens": 200, "ignore_eos": True}
    with kube_processes(tmp_path, _fake_model(tmp_path), ("--engine=fake",)) as cluster, ThreadPoolExecutor(12) as pool:
        _start_one_each(cluster)
        cluster.run_pod("decode-1", "decode", "127.0.0.4")
        cluster.wait_for_instances("prefill-0", "decode-0", "decode-1")
        ahead = [pool.submit(cluster.client.post, "/v1/completions", wanted) for _ in range(12)]
        _wait_until_running(cluster, 12)
        leaving = f"decode-127.0.0.3:{cluster.grpc_port}"
        had = [sample.value for sample in cluster.gauge("pdserve_running") if sample.labels["instance"] == leaving]
        hook_output = cluster.delete_pod("decode-0")
        answers = [each.result() for each in ahead]
        after = cluster.client.post("/v1/completions", wanted)
        retried = [sample.value for sample in cluster.gauge("pdserve_prompts_retried_total")]

    assert [each.status for each in (*answers, after)] == [200] * 13
    assert {each.json()["usage"]["completion_tokens"] for each in (*answers, after)} == {200}
    assert had[0] >= 1
    assert retried == [0]
    assert hook_output.startswith(("no work is left", "the instance has exited"))


@pytest.mark.cluster
@pytest.mark.long
def test_a_dead_container_restarts_in_its_pod_a_scheduler_in_another(tmp_path: Path) -> None:
    with kube_processes(tmp_path, _fake_model(tmp_path), ("--engine=fake",)) as cluster:
        _start_one_each(cluster)
        table = cluster.kube.data("pdserve-ranktable")[TABLE_KEY]
        cluster.crash("decode-0")
        _wait_for_answer(cluster)
        cluster.delete_pod("scheduler-0")
        cluster.run_pod("scheduler-1", "scheduler", "127.0.0.1")
        cluster.wait_ready()
        answer = cluster.client.post("/v1/completions", REQUEST)
        again = cluster.kube.data("pdserve-ranktable")[TABLE_KEY]

    assert answer.status == 200
    assert again == table


@pytest.mark.cluster
@pytest.mark.long
def test_pods_with_their_own_certificates_serve_over_mutual_tls(tmp_path: Path) -> None:
    volume = {"csi": {"driver": "csi.cert-manager.io"}}
    values = {"tls": {"enabled": True, "volume": volume}, "instance": {"probe": "http"}}
    with kube_processes(tmp_path, _fake_model(tmp_path), ("--engine=fake",), values) as cluster:
        _start_one_each(cluster)
        answer = cluster.client.post("/v1/completions", REQUEST)

        with pytest.raises(grpc.RpcError):
            _health(f"127.0.0.3:{cluster.grpc_port}")

    assert answer.status == 200


@pytest.mark.cluster
@pytest.mark.long
def test_a_platforms_table_is_converted_and_followed(tmp_path: Path) -> None:
    path = tmp_path / "platform" / "global_rank_table.json"
    path.parent.mkdir()
    hosts = [f"127.0.0.{number}" for number in (2, 3, 4)]
    instances = [server(host) | {"device": [device("0", host, 0)]} for host in hosts]
    groups = [group(index, entry) for index, entry in enumerate((server("127.0.0.1"), *instances))]
    values = {"table": {"platform": {
        "enabled": True, "path": str(path), "volume": {"emptyDir": {}}, "dialect": "kubeinfer", "numPrefill": 1,
    }}}  # fmt: skip

    def publish(num_groups: int, status: str = "completed") -> None:
        path.with_suffix(".new").write_text(json.dumps(grouped(*groups[:num_groups]) | {"status": status}))
        path.with_suffix(".new").replace(path)

    with kube_processes(tmp_path, _fake_model(tmp_path), ("--engine=fake",), values) as cluster:
        publish(1, "initializing")
        for name, ip in (("scheduler-0", "127.0.0.1"), ("prefill-0", "127.0.0.2"), ("decode-0", "127.0.0.3")):
            cluster.run_pod(name, name.split("-")[0], ip)
        publish(3)
        cluster.wait_ready()
        cluster.run_pod("decode-1", "decode", "127.0.0.4")
        publish(4)
        cluster.wait_for_instances("prefill-0", "decode-0", "decode-1")
        answer = cluster.client.post("/v1/completions", REQUEST)

    assert answer.status == 200
    assert cluster.kube.calls == []


def _start_one_each(cluster: KubeProcesses) -> None:
    cluster.run_pod("table-writer-0", "table-writer", "127.0.0.9")
    cluster.run_pod("scheduler-0", "scheduler", "127.0.0.1")
    cluster.run_pod("prefill-0", "prefill", "127.0.0.2")
    cluster.run_pod("decode-0", "decode", "127.0.0.3")
    cluster.wait_ready()


def _wait_until_running(cluster: KubeProcesses, number: int) -> None:
    deadline, running = time.monotonic() + 300, 0.0
    while time.monotonic() < deadline:
        running = sum(sample.value for sample in cluster.gauge("pdserve_running"))
        if running >= number:
            return
        time.sleep(0.02)
    raise AssertionError(f"{running} of {number} run")


def _wait_for_answer(cluster: KubeProcesses) -> None:
    deadline, answer = time.monotonic() + 300, None
    while time.monotonic() < deadline:
        answer = cluster.client.post("/v1/completions", REQUEST)
        if answer.status == 200:
            return
        time.sleep(0.2)
    raise AssertionError(f"the last answer: {answer}")
