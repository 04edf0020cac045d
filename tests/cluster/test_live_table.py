"""The global table changes while requests run: each ends exactly once, with the right answer."""

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from pdserve.cli import main
from testing.engine.fake_model import FakeConfig
from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.live_cluster import LiveCluster, fake_words, replace
from tests.cluster.pdserve_command import DEADLINE_S, Pdserve
from tests.faults.cluster import NUM_LAYERS, VOCAB_SIZE, make_model

pytestmark = pytest.mark.cluster

NUM_REQUESTS, NUM_WORDS = 20, 60
P0, D0, P1, D1 = "0", "1", "2", "3"


def _prompt(number: int) -> list[int]:
    return [10 + (number * 7 + position) % 200 for position in range(24)]


def _complete(cluster: LiveCluster, prompt: object, max_tokens: int = NUM_WORDS) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    reply = cluster.client.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    (choice,) = reply.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert reply.json()["usage"]["completion_tokens"] == max_tokens
    return str(choice["text"]).strip()


def _request_all(cluster: LiveCluster, pool: ThreadPoolExecutor) -> list[Future[str]]:
    return [pool.submit(_complete, cluster, _prompt(number)) for number in range(NUM_REQUESTS)]


def _grow(cluster: LiveCluster) -> None:
    """Add a decode and a prefill instance, with one change of the table each."""
    cluster.add("decode-1", D1)
    cluster.wait_states({"prefill-0": "living", "decode-0": "living", "decode-1": "living"})
    cluster.add("prefill-1", P1)
    cluster.wait_states(dict.fromkeys(("prefill-0", "prefill-1", "decode-0", "decode-1"), "living"))


@pytest.mark.long
def test_added_instances_are_used_and_a_removed_one_finishes_its_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model")
    (model / "fake.json").write_text(json.dumps({"step_seconds": 0.05, "num_layers": NUM_LAYERS}))
    flags = ("--engine=fake", "--no-enable-prefix-caching")
    with LiveCluster(tmp_path, model, flags=flags) as cluster, ThreadPoolExecutor(NUM_REQUESTS) as pool:
        cluster.up()
        scheduler, first = cluster.processes["scheduler"].pid, cluster.version()
        _grow(cluster)

        requested = _request_all(cluster, pool)
        cluster.wait_running("decode-0", 5)
        removed = cluster.servers("decode").pop(0)
        cluster.publish()
        cluster.wait_states(
            {"prefill-0": "living", "prefill-1": "living", "decode-1": "living", "decode-0": "draining"}
        )
        later = _complete(cluster, _prompt(0))
        answers = [one.result(300) for one in requested]

        config = FakeConfig(vocab_size=VOCAB_SIZE, num_layers=NUM_LAYERS)
        pairs = list(product((P0, P1), (D0, D1)))
        texts_by_pair = [
            fake_words(removed["server_ip"], _prompt(n), NUM_WORDS, pairs, config) for n in range(NUM_REQUESTS)
        ]
        by = [
            [pair for pair in pairs if words[pair] == text] for words, text in zip(texts_by_pair, answers, strict=True)
        ]
        assert all(len(found) == 1 for found in by), answers
        assert {end for ((_, end),) in by} == {D0, D1}
        assert later in (texts_by_pair[0][P0, D1], texts_by_pair[0][P1, D1])
        ended = cluster.processes.pop("decode-0")
        assert ended.wait() == 0
        assert "instance_stopping" in ended.log
        assert "decode-0 (127.0.0.1, devices 1) is gone from the global table" in ended.log.replace(
            removed["server_ip"], "127.0.0.1"
        )
        cluster.wait_states({"prefill-0": "living", "prefill-1": "living", "decode-1": "living"})
        cluster.servers("prefill").pop(0)
        cluster.publish()
        cluster.wait_states({"prefill-1": "living", "decode-1": "living"})
        assert _complete(cluster, _prompt(0), 4).split() == texts_by_pair[0][P1, D1].split()[:4]
        assert cluster.processes.pop("prefill-0").wait() == 0
        assert (cluster.count("requests_received"), cluster.count("requests_completed")) == (22, 22)
        assert (cluster.count("prompts_retried"), cluster.count("requests_failed")) == (0, 0)
        assert cluster.processes["scheduler"].pid == scheduler
        assert (first[0], cluster.version()[0]) == (1, 5)
        assert cluster.version()[1] != first[1]
        log = cluster.processes["scheduler"].log
        assert [f"version={version} digest=" in log for version in (2, 3, 4, 5)] == [True] * 4
        assert main(["status", "--url", cluster.client.base_url]) == 0
        assert f"table 5 ({cluster.version()[1][:8]})" in capsys.readouterr().out
        cluster.wait_idle()


@pytest.mark.long
def test_unusable_tables_leave_the_cluster_as_it_is(tmp_path: Path, fake_model: Path) -> None:
    with LiveCluster(tmp_path, fake_model, flags=("--engine=fake",)) as cluster:
        cluster.up()
        path, scheduler = cluster.tables.global_path, cluster.processes["scheduler"]
        decode = cluster.processes["decode-0"]

        path.write_text(path.read_text()[:200])
        cluster.wait_log("scheduler", "table_ignored")
        cluster.wait_log("decode-0", "table_ignored")
        cluster.publish(status="initializing")
        cluster.wait_log("scheduler", "table_not_ready")
        cluster.wait_log("decode-0", "table_not_ready")
        cluster.publish()
        cluster.wait_log("scheduler", "table_valid_again")
        cluster.wait_log("decode-0", "table_valid_again")
        cluster.add("decode-1", D1)
        cluster.wait_states({"prefill-0": "living", "decode-0": "living", "decode-1": "living"})

        assert scheduler.log.count("table_ignored") == 1
        assert scheduler.log.count("table_not_ready") == 1
        assert decode.log.count("table_ignored") == 1
        assert cluster.version()[0] == 2
        assert _complete(cluster, "hello", 4)


@pytest.mark.long
def test_roles_change_with_the_table_without_a_reload(tmp_path: Path, fake_model: Path) -> None:
    with LiveCluster(tmp_path, fake_model, flags=("--engine=fake",)) as cluster:
        cluster.up()
        pids = {name: process.pid for name, process in cluster.processes.items()}
        prefill, decode = cluster.servers("prefill"), cluster.servers("decode")

        prefill[0], decode[0] = decode[0], prefill[0]
        cluster.publish()
        cluster.wait_states({"prefill-1": "living", "decode-1": "living"})

        assert _complete(cluster, "hello", 4)
        assert {name: process.pid for name, process in cluster.processes.items()} == pids
        cluster.wait_idle()


@pytest.mark.long
def test_up_restarts_only_instances_that_are_in_its_table(tmp_path: Path, fake_model: Path) -> None:
    pdserve = Pdserve(tmp_path / "run", fake_model)
    try:
        assert pdserve.up("--decode", "2").returncode == 0
        (path,) = pdserve.folder.tables.glob("global_ranktable_*.json")
        whole, dead = path.read_text(), pdserve.record("decode-0")
        table = json.loads(whole)
        table["server_group_list"][2]["server_list"].pop(0)
        table["server_group_list"][2]["server_count"] = "1"

        replace(path, json.dumps(table))
        pdserve.wait_log("its entry is gone from the table: it is not restarted")
        assert "decode-0 ended with exit status 0" in pdserve.folder.log("supervisor").read_text()
        (line,) = (line for line in pdserve("status").stdout.splitlines() if line.startswith("decode-0"))
        assert "removed" in line
        assert pdserve.client.post("/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 2}).status == 200
        replace(path, whole)
        pdserve.wait_replaced(dead)
        _wait_living(pdserve, {"prefill-0", "decode-0", "decode-1"})

        assert "table 3 (" in pdserve("status").stdout.splitlines()[0]
    finally:
        assert pdserve("down").returncode == 0


def _wait_living(pdserve: Pdserve, names: set[str]) -> None:
    deadline, living = time.monotonic() + DEADLINE_S, set[str]()
    while living != names:
        assert time.monotonic() < deadline, f"living are {living}, wanted {names}"
        instances = pdserve.client.get("/ready").json()["instances"]
        living = {one["name"] for one in instances if one["state"] == "living"}


@pytest.mark.long
def test_a_real_models_answers_do_not_depend_on_joins_and_leaves(tmp_path: Path, tiny_model: Path) -> None:
    with (
        LiveCluster(tmp_path, tiny_model, flags=ENGINE_FLAGS) as cluster,
        ThreadPoolExecutor(NUM_REQUESTS) as pool,
    ):
        cluster.up()
        before = [one.result(300) for one in _request_all(cluster, pool)]
        _grow(cluster)

        requested = _request_all(cluster, pool)
        cluster.wait_running("decode-0", 1)
        cluster.servers("decode").pop(0)
        cluster.publish()

        assert [one.result(300) for one in requested] == before
        cluster.wait_states({"prefill-0": "living", "prefill-1": "living", "decode-1": "living"})
        assert [one.result(300) for one in _request_all(cluster, pool)] == before
        assert cluster.processes.pop("decode-0").wait() == 0
        assert cluster.count("requests_completed") == 3 * NUM_REQUESTS
        assert cluster.count("requests_failed") == 0
        cluster.wait_idle()
