"""Models by the names that guides print, from a hub on loopback to tokens: no folder is given anywhere."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pdserve.client import Client
from pdserve.ports import free_ports
from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.guide import GuideCluster
from tests.cluster.one_process import client_of
from tests.cluster.pdserve_command import Pdserve
from tests.pdserve.hub.fake_hub import FakeHub
from tests.pdserve.hub.printed_models import LLAMA, NOUS_LLAMA, OPT, QWEN, hub_environment, printed_models, put_code

pytestmark = pytest.mark.cluster

PROMPT = "San Francisco is a"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with printed_models(tmp_path / "repos") as served:
        yield served


def greedy(folder: Path, num_tokens: int) -> str:
    """Return what plain transformers generates after PROMPT."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(PROMPT, return_tensors="pt")
    made = network.generate(
        ids["input_ids"], attention_mask=ids["attention_mask"], max_new_tokens=num_tokens, do_sample=False
    )
    return str(tokenizer.decode(made[0][ids["input_ids"].shape[1] :], skip_special_tokens=True))


def complete(client: Client, name: str, num_tokens: int = 7) -> str:
    body = {"model": name, "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0}
    reply = client.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["text"])


@pytest.mark.long
def test_only_instances_fetch_the_weights_of_a_named_model(hub: FakeHub, tmp_path: Path) -> None:
    with GuideCluster(tmp_path, Path(OPT), flags=("--engine=fake",)) as cluster:
        cluster.start(env=hub_environment(hub, tmp_path))
        cluster.wait_ready()

        assert complete(cluster.client, OPT)
        logs = "".join(process.log for process in cluster.processes.values())

    assert logs.count("making tokenizer.json for ") == 1, logs
    assert set(hub.fetched) == {
        "config.json", "generation_config.json", "merges.txt", "tokenizer_config.json", "vocab.json",
    }  # fmt: skip
    assert {token for _, _, token in hub.seen} == {hub.token}


@pytest.mark.long
def test_every_process_finds_the_same_model_by_its_name(hub: FakeHub, tmp_path: Path) -> None:
    expected, marker = greedy(hub.repos[OPT], 7), tmp_path / "marker"
    put_code(hub.repos[OPT], marker)
    with GuideCluster(tmp_path, Path(OPT), flags=ENGINE_FLAGS) as cluster:
        cluster.start(env=hub_environment(hub, tmp_path))
        cluster.wait_ready()

        assert complete(cluster.client, OPT) == expected
        logs = "".join(process.log for process in cluster.processes.values())

    assert logs.count("to safetensors: 1 .bin") == 1, logs
    assert not marker.exists()
    assert not list((tmp_path / "huggingface").rglob("*.py"))
    assert {token for _, _, token in hub.seen} == {hub.token}
    assert hub.fetched.count("pytorch_model.bin") == 1


@pytest.mark.long
@pytest.mark.parametrize("name", [LLAMA, NOUS_LLAMA, QWEN, OPT])
def test_up_fetches_before_it_starts_anything(name: str, hub: FakeHub, tmp_path: Path) -> None:
    command = Pdserve(tmp_path / "run", Path(name))
    command.engine, command.environ = ENGINE_FLAGS, hub_environment(hub, tmp_path)
    try:
        up = command.up()

        assert up.returncode == 0, up.stderr
        assert up.stderr.startswith(f"downloading {name} from {hub.url}: ")
        client = command.client_for_long_answers
        assert complete(client, name) == complete(client, "tiny") == greedy(hub.repos[name], 7)
    finally:
        command("down")


@pytest.mark.long
def test_code_beside_a_local_model_never_runs(hub: FakeHub, tmp_path: Path) -> None:
    expected, marker = greedy(hub.repos[LLAMA], 7), tmp_path / "marker"
    put_code(hub.repos[LLAMA], marker)
    command = Pdserve(tmp_path / "run", hub.repos[LLAMA])
    command.engine = (*ENGINE_FLAGS, "--trust-remote-code")
    try:
        up = command.up()

        assert up.returncode == 0, up.stderr
        assert "--trust-remote-code (a model's own code is never run)" in up.stderr
        assert complete(command.client_for_long_answers, "tiny") == expected
    finally:
        command("down")
    assert not marker.exists()


def test_up_of_a_gated_model_is_one_line_and_starts_nothing(hub: FakeHub, tmp_path: Path) -> None:
    hub.gated.add(LLAMA)
    command = Pdserve(tmp_path / "run", Path(LLAMA))
    command.environ = hub_environment(hub, tmp_path)

    up = command.up()

    assert up.returncode == 2
    (line,) = up.stderr.splitlines()
    assert line.startswith(
        f"pdserve up: {LLAMA} is gated: accept its conditions at {hub.url}/{LLAMA}, then set HF_TOKEN"
    )
    assert command.folder.read() is None


@pytest.mark.long
def test_serve_accepts_a_name_instead_of_a_folder(hub: FakeHub, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-P", "-m", "pdserve", "serve", QWEN, "--port", str(port), *ENGINE_FLAGS]
    environ = Pdserve(tmp_path / "run", Path(QWEN))._env | hub_environment(hub, tmp_path)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as server:
        client = client_of(server, port)

        assert complete(client, QWEN) == greedy(hub.repos[QWEN], 7)
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [QWEN]
        server.terminate()
        server.communicate(timeout=300)
        assert server.wait(300) == 0
