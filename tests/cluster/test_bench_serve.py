"""`pdserve bench serve` as a user types it, against a real cluster on the fake engine."""

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.guide import GuideCluster
from tests.conftest import MISSING
from tests.kvtransfer.rig import until

pytestmark = pytest.mark.cluster


@pytest.fixture
def cluster(fake_cluster: GuideCluster) -> GuideCluster:
    return fake_cluster


def command(cluster: GuideCluster, *flags: str) -> list[str]:
    url = cluster.client.base_url
    return [sys.executable, "-P", "-m", "pdserve", "bench", "serve", "--base-url", url, *flags]


def bench(cluster: GuideCluster, *flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(cluster, *flags), capture_output=True, text=True, timeout=300)


def completed(cluster: GuideCluster) -> float:
    return sum(sample.value for sample in cluster.gauge("pdserve_requests_completed_total"))


def saved_result(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    fields: dict[str, Any] = json.loads(path.read_text())
    return fields


def test_a_random_load_is_measured_saved_and_plotted(cluster: GuideCluster, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason=f"{MISSING}: matplotlib, of the extra `plot`")
    picture = tmp_path / "run.svg"

    done = bench(
        cluster, "--num-prompts", "12", "--random-input-len", "40", "--random-output-len", "8", "--ignore-eos",
        "--request-rate", "200", "--goodput", "e2el:100000", "--save-result", "--save-detailed",
        "--result-dir", str(tmp_path / "results"), "--metadata", "note=x", "--plot", str(picture),
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("12 requests completed, 0 failed in ")
    result = saved_result(tmp_path / "results")
    assert (result["model_id"], result["backend"], result["num_prompts"], result["note"]) == ("tiny", "openai", 12, "x")
    assert (result["completed"], result["failed"], result["request_rate"]) == (12, 0, 200.0)
    assert result["input_lens"] == [40] * 12
    assert result["output_lens"] == [8] * 12
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (480, 96)
    assert result["request_goodput"] == result["request_throughput"] > 0
    assert result["p99_longest_gap_ms"] >= result["median_itl_ms"] > 0
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")


@pytest.mark.long
def test_chats_and_files_are_loads_too(cluster: GuideCluster, tmp_path: Path) -> None:
    custom, talks = tmp_path / "prompts.jsonl", tmp_path / "talks.json"
    custom.write_text('{"prompt": "hello", "output_tokens": 3}\n{"prompt": "again"}\n')
    turns = [{"from": "human", "value": "how are you today"}, {"from": "gpt", "value": "well enough, thank you"}]
    talks.write_text(json.dumps([{"conversations": turns}, {"conversations": [*turns[:1], {"value": "x"}]}]))
    flags = ("--backend", "openai-chat", "--ignore-eos", "--save-result", "--save-detailed", "--max-concurrency", "2")

    for name, path in (("random", None), ("custom", custom), ("sharegpt", talks)):
        where = ("--dataset-path", str(path)) if path else ("--random-input-len", "9", "--random-output-len", "5")
        folder = tmp_path / name
        more = ("--custom-output-len", "6") if name == "custom" else ()
        done = bench(
            cluster, "--dataset-name", name, "--num-prompts", "3", "--result-dir", str(folder), *where, *flags, *more
        )
        assert done.returncode == 0, done.stderr
        assert saved_result(folder)["completed"] == 3

    assert saved_result(tmp_path / "random")["output_lens"] == [5, 5, 5]
    assert saved_result(tmp_path / "custom")["output_lens"] == [6, 6, 6]
    answer = cluster.client.post("/tokenize", {"model": "tiny", "prompt": turns[1]["value"]}).json()
    assert saved_result(tmp_path / "sharegpt")["output_lens"] == [answer["count"]] * 3


@pytest.mark.long
def test_results_are_appended_and_a_starting_server_is_awaited(cluster: GuideCluster, tmp_path: Path) -> None:
    flags = (
        "--num-prompts", "1", "--random-input-len", "9", "--random-output-len", "2", "--top-p", "0.9", "--save-result",
        "--append-result", "--result-dir", str(tmp_path), "--result-filename", "runs.jsonl", "--model", "org/m",
        "--served-model-name", "tiny", "--ready-check-timeout-sec", "30",
    )  # fmt: skip
    ended = [bench(cluster, *flags), bench(cluster, *flags)]
    gone = subprocess.run(
        [*command(cluster)[:-1], "http://127.0.0.1:1", "--ready-check-timeout-sec", "1"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert [one.returncode for one in ended] == [0, 0], ended
    results = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(one["model_id"], one["completed"]) for one in results] == [("org/m", 1)] * 2
    assert gone.returncode == 1
    assert "no connection: Connection refused (--ready-check-timeout-sec 1); `pdserve up" in gone.stderr


@pytest.mark.long
def test_vectors_are_a_load_too(cluster: GuideCluster, tmp_path: Path) -> None:
    done = bench(
        cluster, "--backend", "openai-embeddings", "--num-prompts", "5", "--random-input-len", "9", "--save-result",
        "--result-dir", str(tmp_path),
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    result = saved_result(tmp_path)
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (5, 45, 0)
    assert result["input_sequence_throughput"] == result["request_throughput"] > 0
    assert result["p99_e2el_ms"] > 0
    assert "mean_ttft_ms" not in result


def test_errors_are_counted_by_kind_and_only_errors_are_a_failure(cluster: GuideCluster) -> None:
    done = bench(cluster, "--num-prompts", "3", "--random-input-len", "4000", "--disable-tqdm")

    assert done.returncode == 1
    first, kinds = done.stdout.splitlines()
    assert first.startswith("0 requests completed, 3 failed in ")
    assert kinds.startswith("  3 x HTTP 400, first: ")
    url = cluster.client.base_url
    assert done.stderr == f"pdserve bench serve: nothing was measured: none of the 3 requests to {url} completed\n"


@pytest.mark.long
def test_ctrl_c_prints_what_was_measured(cluster: GuideCluster, tmp_path: Path) -> None:
    before = completed(cluster)
    running = subprocess.Popen(
        command(
            cluster, "--num-prompts", "500", "--random-input-len", "20", "--random-output-len", "4", "--ignore-eos",
            "--request-rate", "20", "--save-result", "--result-dir", str(tmp_path),
        ),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip
    until(lambda: completed(cluster) >= before + 3)

    running.send_signal(signal.SIGINT)
    output, errors = running.communicate(timeout=300)

    assert running.returncode == 130, errors
    assert "unfinished in" in output.splitlines()[0]
    assert "Traceback" not in errors
    assert 0 < saved_result(tmp_path)["completed"] < 500


def test_a_server_that_is_not_running_is_one_line(cluster: GuideCluster) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pdserve", "bench", "serve", "--base-url", "http://127.0.0.1:1"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("pdserve bench serve: http://127.0.0.1:1/v1/models does not answer: ")
