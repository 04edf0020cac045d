"""The guides' curl lines and client scripts, run as printed against clusters of tiny models under the printed names."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve.client import Client
from pdserve.ports import free_ports
from pdserve.processes import POLL_S
from pdserve.readiness import check_ready
from tests.cluster.conftest import ENGINE_FLAGS, fake_model  # noqa: F401 - a fixture
from tests.cluster.guide import CLONE, START_TIMEOUT_S, GuideCluster
from tests.conformance import printed as guides
from tests.engine.bin_models import make_bin_model
from tests.engine.tiny_models import make_tiny_model
from tests.pdserve.hub.fake_hub import FakeHub
from tests.pdserve.hub.printed_models import hub_environment

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("curl") is None, reason="missing tool: curl"),
]


def curl(command: str, url: str, model: str = "") -> dict[str, Any]:
    """Run a printed curl line; return the JSON it prints."""
    line = command.replace("URL", url).replace("MODEL", model)
    ended = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, timeout=300, env=_environ_without_proxies()
    )
    assert ended.returncode == 0, ended.stderr
    answer: dict[str, Any] = json.loads(ended.stdout)
    assert "error" not in answer, answer
    return answer


def script(text: str, url: str, more: str = "") -> str:
    """Run a printed script and `more` lines behind it; return what it prints."""
    command = [sys.executable, "-c", text.replace("URL", url) + more]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=_environ_without_proxies())
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def _environ_without_proxies() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of 1,024 positions: the guide's longest prompt and its answer do not fit into 512 here."""
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("printed") / "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return folder


@pytest.fixture(scope="module")
def printed(long_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a P/D cluster whose model goes by both printed names and by its path."""
    flags = (*ENGINE_FLAGS, "--served-model-name", guides.NOUS, guides.OPT)
    folder = tmp_path_factory.mktemp("printed-pair")
    with GuideCluster(folder, long_model, prefill=("4",), decode=("6",), flags=flags) as cluster:
        yield cluster.up().client.base_url
        cluster.wait_idle()


@pytest.mark.long
@pytest.mark.covers("A2.28", "A2.29", "A2.30")
def test_the_curl_lines_run_as_printed(printed: str) -> None:
    assert {card["id"] for card in curl(guides.MODELS, printed)["data"]} >= {guides.OPT, guides.NOUS}
    completion = curl(guides.COMPLETION, printed)
    assert completion["usage"]["completion_tokens"] <= 7
    assert completion["model"] == guides.OPT
    assert curl(guides.CHAT, printed)["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.long
@pytest.mark.covers("A9.134", "A9.135")
def test_the_guides_curl_lines_run_as_printed(printed: str, long_model: Path) -> None:
    chat = curl(guides.GUIDES_CHAT, printed, str(long_model))
    assert (chat["object"], chat["model"]) == ("chat.completion", str(long_model))
    choice = curl(guides.GUIDES_JSON, printed, str(long_model))["choices"][0]
    assert choice["finish_reason"] in ("stop", "length")
    assert choice["text"].lstrip().startswith("{")
    if choice["finish_reason"] == "stop":
        assert set(json.loads(choice["text"])) == {"name", "age", "armor", "weapon", "strength"}


@pytest.mark.long
@pytest.mark.covers("A2.34", "A2.39")
def test_the_client_scripts_run_as_printed(printed: str) -> None:
    assert script(guides.COMPLETION_CLIENT, printed).startswith("Completion result: Completion(id='cmpl-")
    assert script(guides.CHAT_CLIENT, printed).startswith("Chat response: ChatCompletion(id='chatcmpl-")
    output = script(guides.KEYED_CLIENT, printed, "print(completion.choices[0].message.content)").splitlines()
    assert output[0].startswith("ChatCompletionMessage(content=")
    assert output[-1] in ("positive", "negative")


@pytest.mark.long
@pytest.mark.covers("B.clients.1")
def test_the_examples_of_clients_run(printed: str) -> None:
    finished = {
        name: subprocess.run(
            [sys.executable, str(CLONE / "examples" / name), "--base-url", f"{printed}/v1"],
            capture_output=True, text=True, timeout=300, env=_environ_without_proxies(),
        )
        for name in ("openai_completion_client.py", "openai_chat_client.py")
    }  # fmt: skip

    assert [ended.returncode for ended in finished.values()] == [0, 0], [ended.stderr for ended in finished.values()]
    assert finished["openai_completion_client.py"].stdout.startswith("0: ")
    assert re.search(r"^(yes|no)\n\s*\{", finished["openai_chat_client.py"].stdout, re.MULTILINE)


@pytest.mark.long
@pytest.mark.covers("A2.32")
@pytest.mark.parametrize("reported", ["flag", "environment"])
def test_a_key_is_required_before_p_and_d(tmp_path: Path, fake_model: Path, reported: str) -> None:  # noqa: F811
    key, cluster = "token-abc123", GuideCluster(tmp_path, fake_model, flags=("--engine=fake",))
    body = '{"model": "tiny", "prompt": "a", "max_tokens": 2}'
    with cluster:
        cluster.start(*cluster.names)
        env = {"VLLM_API_KEY": "beaten" if reported == "flag" else key}
        cluster.start("scheduler", env=env, flags=("--api-key", key) if reported == "flag" else ())
        cluster.wait_ready()

        def status(*headers: str, path: str = "/v1/completions") -> str:
            headers_args = [part for header in headers for part in ("-H", header)]
            sent = ["-d", body, "-H", "Content-Type: application/json"] if path.startswith("/v1") else []
            command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", *headers_args, *sent]
            url = cluster.client.base_url + path
            return subprocess.run(
                [*command, url], capture_output=True, text=True, timeout=300, env=_environ_without_proxies()
            ).stdout

        assert status(f"Authorization: Bearer {key}") == "200"
        for wrong in (
            (),
            ("Authorization: Bearer beaten",),
            (f"Authorization: {key}",),
            ("Authorization: Bearer EMPTY",),
        ):
            assert status(*wrong) == "401"
        assert [status(path=path) for path in ("/health", "/ready", "/ping", "/metrics")] == ["200"] * 4


@contextmanager
def command(words: tuple[str, ...], name: str, model: Path, folder: Path) -> Iterator[Client]:
    """Run a printed command, from the folder of ./examples, until it serves the model of a hub; stop it at the end."""
    (port,), log = free_ports(1), folder / "log"
    client = Client(f"http://127.0.0.1:{port}")
    with FakeHub({name: model}) as hub, log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", *words, "--port", str(port), *ENGINE_FLAGS[1:]],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=CLONE,
            env=_environ_without_proxies() | hub_environment(hub, folder),
        )  # fmt: skip
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not check_ready(client)[0]:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(POLL_S)
            yield client
        finally:
            process.terminate()
            assert process.wait(300) == 0, log.read_text()


@pytest.mark.covers("A2.25", "A2.32")
@pytest.mark.long
def test_serve_as_printed_answers_only_clients_with_its_key(tmp_path: Path) -> None:
    with command(guides.SERVE, guides.NOUS, make_tiny_model("llama3", tmp_path / "nous"), tmp_path) as client:
        output = script(guides.KEYED_CLIENT, client.base_url, "print(completion.choices[0].message.content)")

        assert output.splitlines()[-1] in ("positive", "negative")
        assert [client.get(path).status for path in ("/health", "/v1/models")] == [200, 401]


@pytest.mark.covers("A2.26", "A2.28", "A2.29", "A2.30")
@pytest.mark.long
def test_the_printed_module_takes_the_template_and_the_curl_lines(tmp_path: Path) -> None:
    with command(guides.API_SERVER, guides.OPT, make_bin_model(tmp_path / "opt"), tmp_path) as client:
        url = client.base_url

        assert [card["id"] for card in curl(guides.MODELS, url)["data"]] == [guides.OPT]
        assert curl(guides.COMPLETION, url)["usage"]["completion_tokens"] <= 7
        assert curl(guides.CHAT, url)["choices"][0]["message"]["role"] == "assistant"
        assert "Completion(" in script(guides.COMPLETION_CLIENT, url)
        assert "ChatCompletion(" in script(guides.CHAT_CLIENT, url)
