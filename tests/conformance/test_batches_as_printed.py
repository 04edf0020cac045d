"""The guides' batches: their files and commands, as printed, with tiny models under the printed names at a hub."""

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.guide import CLONE
from tests.conformance import printed_batches as guides
from tests.conformance.test_encoders import save_words
from tests.engine.tiny_encoders import make_cross_encoder
from tests.engine.tiny_models import make_tiny_model
from tests.pdserve.batches import Ended, read, run
from tests.pdserve.hub.fake_hub import FakeHub
from tests.pdserve.hub.printed_models import hub_environment
from tests.pdserve.loopback import Loopback

pytestmark = pytest.mark.cluster

OPENAI_FILE = "offline_inference/openai_batch/openai_example_batch.jsonl"
BATCHED_FILE = "openai_api/batched_example.jsonl"
OPENAI_SITE = f"/vllm-project/vllm/main/examples/{OPENAI_FILE}"
BATCHED_SITE = f"/PygmalionAI/aphrodite-engine/rc_054/examples/{BATCHED_FILE}"
HERE = " --allow-private-urls 127.0.0.1/32"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    """The printed models, with room for the 1,000 tokens that the files request; Llama 3 requires a token."""
    folder, repos = tmp_path_factory.mktemp("printed-batches"), dict[str, Path]()
    for name, kind in ((guides.LLAMA, "llama"), (guides.NOUS_31, "llama3")):
        repos[name] = make_tiny_model(kind, folder / kind)
        config = json.loads((repos[name] / "config.json").read_text())
        (repos[name] / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    with FakeHub(repos) as made:
        made.needs_token.add(guides.LLAMA)
        yield made


def shell(command: str, folder: Path, hub: FakeHub, more: str = "") -> Ended:
    """Run a printed line in a folder with the example files, as a user of the hub with a token."""
    shutil.copytree(CLONE / "examples" / "offline_inference", folder / "offline_inference", dirs_exist_ok=True)
    shutil.copy(CLONE / "examples" / BATCHED_FILE, folder)
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    (bin_folder / "python").unlink(missing_ok=True)
    (bin_folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (bin_folder / "pdserve").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m pdserve "$@"\n')
    for name in ("python", "pdserve"):
        (bin_folder / name).chmod(0o755)
    code = "import subprocess, sys; sys.exit(subprocess.run(['sh', '-c', sys.argv[1]]).returncode)"
    env = hub_environment(hub, folder) | {"PATH": f"{bin_folder}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return run(folder, "-P", "-c", code, command.rstrip() + more, env=env)


def check(output: Path, model: str) -> None:
    """Fail unless both printed chats were answered by the model."""
    lines = read(output)
    assert [line["custom_id"] for line in lines] == ["request-1", "request-2"]
    for line in lines:
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        answer = line["response"]["body"]
        assert (answer["object"], answer["model"]) == ("chat.completion", model)
        assert answer["choices"][0]["message"]["role"] == "assistant"


def test_the_example_files_are_those_of_the_guides() -> None:
    for name, field, model in (
        (OPENAI_FILE, "max_completion_tokens", guides.LLAMA), (BATCHED_FILE, "max_tokens", guides.NOUS_31),
    ):  # fmt: skip
        lines = read(CLONE / "examples" / name)
        assert [(line["custom_id"], line["method"], line["url"]) for line in lines] == [
            (f"request-{number}", "POST", "/v1/chat/completions") for number in (1, 2)
        ]
        for line, kind in zip(lines, ("a helpful", "an unhelpful"), strict=True):
            system = {"role": "system", "content": f"You are {kind} assistant."}
            user = {"role": "user", "content": "Hello world!"}
            assert line["body"] == {"model": model, "messages": [system, user], field: 1000}


@pytest.mark.covers("A1.2", "A1.3", "A1.5", "A1.8", "A1.18")
@pytest.mark.long
@pytest.mark.parametrize("command", [guides.OPENAI_MODULE, guides.OPENAI_COMMAND], ids=["module", "command"])
def test_the_openai_example_runs_as_printed(tmp_path: Path, hub: FakeHub, command: str) -> None:
    ended = shell(command, tmp_path, hub)

    assert ended.status == 0, ended.err
    check(tmp_path / "results.jsonl", guides.LLAMA)
    assert {token for method, path, token in hub.seen if guides.LLAMA in path} == {hub.token}


@pytest.mark.covers("A1.18")
@pytest.mark.long
def test_a_gated_model_is_refused_without_a_token(tmp_path: Path, hub: FakeHub) -> None:
    before, hub.token = hub.token, "hf_another"
    try:
        ended = shell("HF_TOKEN= " + guides.OPENAI_COMMAND, tmp_path, hub)
    finally:
        hub.token = before

    assert ended.status == 2
    assert guides.LLAMA in ended.err
    assert not (tmp_path / "results.jsonl").exists()


@pytest.mark.covers("A1.3", "A1.5", "A1.8")
@pytest.mark.long
def test_the_other_guides_example_runs_as_printed(tmp_path: Path, hub: FakeHub) -> None:
    ended = shell(guides.BATCHED_MODULE, tmp_path, hub)

    assert ended.status == 0, ended.err
    check(tmp_path / "results.jsonl", guides.NOUS_31)


@pytest.mark.covers("A1.13")
@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "path", "model"),
    [
        (guides.OPENAI_REMOTE, OPENAI_SITE, guides.LLAMA),
        (guides.BATCHED_REMOTE, BATCHED_SITE, guides.NOUS_31),
    ],
    ids=["openai", "batched"],
)
def test_the_example_is_fetched_as_printed(tmp_path: Path, hub: FakeHub, command: str, path: str, model: str) -> None:
    file = CLONE / "examples" / path.partition("/examples/")[2]
    with Loopback({path: file.read_bytes()}) as site:
        ended = shell(command.replace("SITE", site.url), tmp_path, hub, HERE)

    assert ended.status == 0, ended.err
    check(tmp_path / "results.jsonl", model)


@pytest.mark.covers("A1.15", "A1.17")
@pytest.mark.long
def test_presigned_urls_as_printed_are_read_and_written_byte_for_byte(tmp_path: Path, hub: FakeHub) -> None:
    content = (CLONE / "examples" / OPENAI_FILE).read_bytes()
    command = guides.OPENAI_PRESIGNED.replace("EXPIRES", str(int(time.time()) + 3600))
    with Loopback({"/MY_BUCKET/MY_INPUT_FILE.jsonl": content}) as site:
        ended = shell(command.replace("SITE", site.url), tmp_path, hub, HERE)

        assert ended.status == 0, ended.err
        ((path, sent),) = site.puts
    wanted = command.partition('-o "SITE')[2].partition('"')[0]
    assert path == wanted
    (tmp_path / "sent.jsonl").write_bytes(sent)
    check(tmp_path / "sent.jsonl", guides.LLAMA)


@pytest.mark.covers("A1.9", "A1.10")
@pytest.mark.long
@pytest.mark.parametrize("text", [guides.EMBEDDINGS, guides.SCORES], ids=["embeddings", "scores"])
def test_the_printed_vectors_and_scores_are_answered(tmp_path: Path, hub: FakeHub, text: str) -> None:
    (tmp_path / "in.jsonl").write_text(text)
    name = json.loads(text.splitlines()[0])["body"]["model"]
    model = make_tiny_model("mistral", tmp_path / "model")
    if "bge" in name:
        model = make_cross_encoder(tmp_path / "cross")
        save_words(model)

    command = f"pdserve run-batch -i in.jsonl -o out.jsonl --model {model} --served-model-name {name}"
    ended = shell(command, tmp_path, hub)

    assert ended.status == 0, ended.err
    for line in read(tmp_path / "out.jsonl"):
        assert (line["error"], line["response"]["body"]["model"]) == (None, name)
        for one in line["response"]["body"]["data"]:
            assert "embedding" in one or 0 <= one["score"] <= 1
