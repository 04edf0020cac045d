"""Images in chats over P/D, from the client's request to the tokens of transformers, also where a P dies in between."""

import asyncio
import base64
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve import cli
from processes.failpoints import VARIABLE
from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.guide import CLONE, GuideCluster
from tests.conformance import printed
from tests.images.image_files import file_of, image_of
from tests.instance.image_prompts import ImageModel, make_chat_model

pytestmark = [pytest.mark.cluster, pytest.mark.long]

CAT, DOG = file_of(image_of(30, 20)), file_of(image_of(41, 40, seed=2), "JPEG")
NUM_TOKENS = 8
SMALL_CHUNKS = ("--prefill-chunk-size=16",)
BROKEN = CAT[: len(CAT) // 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    """A tiny LLaVA whose chat template takes texts."""
    return make_chat_model(tmp_path_factory.mktemp("vision") / "llava")


@pytest.fixture(scope="module")
def cluster(model: ImageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuideCluster]:
    """The second of two P, and a D, with the template of LLaVA for models without one."""
    folder = tmp_path_factory.mktemp("images")
    flags = (*ENGINE_FLAGS, *SMALL_CHUNKS)
    with GuideCluster(folder, model.folder, prefill=("0", "1"), decode=("2",), flags=flags) as made:
        made.start("prefill-1", "decode-0")
        template = str(CLONE / "examples" / "template_llava.jinja")
        flags = ("--enable-mm-embeds", "--chat-template", template, "--allow-private-urls=127.0.0.1/32")
        made.start("scheduler", flags=flags)
        made.wait_ready()
        yield made
        made.wait_idle()


def _body(text: str, *files: bytes, embeds: Sequence[bytes] = (), **fields: Any) -> dict[str, Any]:
    urls = [f"data:image/any;base64,{base64.b64encode(data).decode()}" for data in files]
    images: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    for values in embeds:
        given = {"data": base64.b64encode(values).decode(), "dtype": "float32", "shape": [16, len(values) // 64]}
        images.append({"type": "image_embeds", "image_embeds": given})
    messages = [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]
    settings = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    return {"model": "tiny", "messages": messages, **settings, **fields}


CASES: list[tuple[str, tuple[bytes, ...]]] = [
    ("what is this?", (CAT,)), ("and this?", (DOG,)), ("which one is the cat?", (CAT, DOG)), ("only text here", ()),
]  # fmt: skip


@pytest.mark.covers("A10.146", "B.images.1", "B.images.6")
def test_a_killed_p_loses_no_image_and_answers_are_transformers(cluster: GuideCluster, model: ImageModel) -> None:
    """The first P is killed within the first prompt of several chunks."""
    cluster.start("prefill-0", env={VARIABLE: "prefill.between_chunks=kill9"})
    cluster.wait_living()

    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=cluster.client.base_url, timeout=300, trust_env=False) as http:
            bodies = [_body(text, *files) for text, files in CASES]
            bodies += [_body(text, embeds=list(map(model.embeddings, files))) for text, files in CASES]
            return await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for body in bodies))

    for (_, files), response in zip(CASES * 2, asyncio.run(ask_all()), strict=True):
        assert response.status_code == 200, response.text
        answer = response.json()
        expected = model.continued(answer["prompt_token_ids"], files, NUM_TOKENS)
        assert answer["choices"][0]["token_ids"] == expected
        assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
    assert sum(sample.value for sample in cluster.gauge("pdserve_prompts_retried_total")) > 0
    assert cluster.processes["prefill-0"].wait() == -9
    cluster.retired.append(cluster.processes.pop("prefill-0"))


@pytest.mark.covers("B.images.9")
@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readmes_image_example_runs_as_printed(
    cluster: GuideCluster, model: ImageModel, tmp_path: Path, page: str
) -> None:
    text = (CLONE / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (example,) = [block for block in blocks if "image_url" in block]
    url = f"{cluster.client.base_url}/v1"
    code = f"from openai import OpenAI\nclient = OpenAI(base_url={url!r}, api_key='EMPTY')\n{example}"
    code = code.replace("llava-1.5-7b-hf", "tiny") + "\nprint(answer.usage.prompt_tokens)\n"
    (tmp_path / "picture.png").write_bytes(CAT)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path)

    assert ended.returncode == 0, ended.stderr[-3000:]
    assert int(ended.stdout.splitlines()[-1]) > 16, "the tokens of the image"


class _Pictures(BaseHTTPRequestHandler):
    """A server of one picture under every name."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(DOG)))
        self.end_headers()
        self.wfile.write(DOG)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def picture() -> Iterator[str]:
    """The URL of a picture."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Pictures) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/dog.jpg"
        server.shutdown()


@pytest.mark.covers("B.images.9")
@pytest.mark.skipif(shutil.which("curl") is None, reason="missing tool: curl")
@pytest.mark.parametrize("page", ["images.md", "images.zh-CN.md"])
def test_the_pages_curl_line_runs_as_printed(cluster: GuideCluster, picture: str, page: str) -> None:
    text = (CLONE / "docs" / page).read_text(encoding="utf-8")
    (line,) = re.findall(r"^```sh\n(curl .*?)^```$", text, re.MULTILINE | re.DOTALL)
    for shown, ours in (
        ("http://127.0.0.1:9000", cluster.client.base_url), ("llava-1.5-7b-hf", "tiny"),
        ("https://example.com/picture.png", picture),
    ):  # fmt: skip
        assert shown in line
        line = line.replace(shown, ours)
    ended = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=300)

    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["usage"]["prompt_tokens"] > 16, "the tokens of the image"


@pytest.mark.covers("B.images.9")
def test_the_documents_picture_client_runs_as_printed(cluster: GuideCluster, picture: str) -> None:
    code = printed.PICTURE_CLIENT.replace("URL/v1", f"{cluster.client.base_url}/v1")
    code = code.replace(printed.LLAVA, "tiny").replace(printed.PICTURE, picture)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)

    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.startswith("Chat response: ChatCompletion(id='chatcmpl-")


@pytest.mark.covers("B.images.14")
def test_embeds_answer_as_the_image_that_they_are_of(cluster: GuideCluster, model: ImageModel) -> None:
    url = f"{cluster.client.base_url}/v1/chat/completions"
    values = model.embeddings(CAT)
    bodies = (
        _body("what?", CAT, DOG),
        _body("what?", CAT, embeds=[model.embeddings(DOG)]),
        _body("what?", embeds=[values]),
    )
    image, mixed, alone = (httpx.post(url, json=body, timeout=300, trust_env=False).json() for body in bodies)

    assert mixed["prompt_token_ids"] == image["prompt_token_ids"]
    assert mixed["choices"][0]["token_ids"] == image["choices"][0]["token_ids"]
    assert image["choices"][0]["token_ids"] == model.continued(image["prompt_token_ids"], [CAT, DOG], NUM_TOKENS)
    assert alone["choices"][0]["token_ids"] == model.continued(alone["prompt_token_ids"], [CAT], NUM_TOKENS)


@pytest.mark.covers("B.images.5")
def test_a_broken_image_fails_alone_and_streams_go_on(cluster: GuideCluster, model: ImageModel) -> None:
    url = f"{cluster.client.base_url}/v1/chat/completions"
    broken = httpx.post(url, json=_body("broken", CAT, BROKEN), timeout=300, trust_env=False)

    assert broken.status_code == 400, broken.text
    error = broken.json()["error"]
    assert error["param"] == "messages.0.content.1"
    assert "image 1: the image file is broken" in error["message"], "the instance says so, not the header"
    streamed = httpx.post(url, json=_body("what is this?", CAT, stream=True), timeout=300, trust_env=False).text
    whole = httpx.post(url, json=_body("what is this?", CAT), timeout=300, trust_env=False).json()
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert (
        "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        == (whole["choices"][0]["message"]["content"])
    )
    assert whole["choices"][0]["token_ids"] == model.continued(whole["prompt_token_ids"], [CAT], NUM_TOKENS)


def test_a_decode_instance_without_image_encoder_stays_one(
    cluster: GuideCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["role", "decode-0", "combined", "--url", cluster.client.base_url]) == 2
    assert "decode-0 stays decode: it started as a decode instance, without the image enc" in capsys.readouterr().err
    assert cli.main(["role", "prefill-1", "combined", "--url", cluster.client.base_url]) == 0
    assert cli.main(["role", "prefill-1", "prefill", "--url", cluster.client.base_url]) == 0
