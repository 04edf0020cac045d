"""A8.105 and 106 over real processes: USE_OPENAI=0 on one prefill and one decode instance of the fake engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import fake_model, slow_fake_model  # noqa: F401 - fixtures
from tests.cluster.guide import GuideCluster

pytestmark = [pytest.mark.cluster, pytest.mark.long]

ASKED: dict[str, Any] = {"prompt": "the quick brown fox", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, slow_fake_model: Path) -> Iterator[GuideCluster]:  # noqa: F811
    folder = tmp_path_factory.mktemp("generate")
    with GuideCluster(folder, slow_fake_model, prefill=("4",), decode=("6",), flags=("--engine=fake",)) as cluster:
        cluster.start(*cluster.names)
        cluster.start("scheduler", env={"USE_OPENAI": "0"})
        cluster.wait_ready()
        yield cluster


@pytest.fixture
def http(cluster: GuideCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.client.base_url, timeout=300, trust_env=False) as client:
        yield client
    cluster.wait_idle()


def frames(response: httpx.Response) -> Iterator[list[str]]:
    """Yield the texts of each frame as it comes."""
    left = b""
    for part in response.iter_bytes():
        *whole, left = (left + part).split(b"\0")
        yield from (json.loads(frame)["text"] for frame in whole)
    assert left == b""


@pytest.mark.covers("A8.105")
def test_a_stream_ends_with_the_complete_answer(http: httpx.Client) -> None:
    whole = http.post("/generate", json=ASKED).json()["text"]
    with http.stream("POST", "/generate", json=ASKED | {"stream": True}) as response:
        reported = list(frames(response))

    assert whole[0].startswith("the quick brown fox")
    assert len(whole[0]) > len("the quick brown fox")
    assert reported[-1] == whole
    assert len(reported) > 1
    assert all(whole[0].startswith(text) for (text,) in reported)


@pytest.mark.covers("A8.105")
def test_every_choice_has_a_text(http: httpx.Client) -> None:
    texts = http.post("/generate", json=ASKED | {"n": 2, "temperature": 0.8}).json()["text"]

    assert len(texts) == 2
    assert all(text.startswith("the quick brown fox") for text in texts)


@pytest.mark.covers("A8.105")
def test_unknown_fields_are_refused(http: httpx.Client) -> None:
    response = http.post("/generate", json=ASKED | {"temprature": 1})

    assert (response.status_code, response.json()["error"]["param"]) == (400, "temprature")


@pytest.mark.covers("A8.105")
def test_a_client_that_goes_away_frees_its_blocks(cluster: GuideCluster, http: httpx.Client) -> None:
    with http.stream("POST", "/generate", json=ASKED | {"max_tokens": 400, "stream": True}) as response:
        next(frames(response))

    cluster.wait_idle()


@pytest.mark.covers("A8.106")
def test_the_openai_routes_are_404(http: httpx.Client) -> None:
    assert http.get("/v1/models").status_code == 404
    assert http.post("/v1/completions", json={"model": "tiny", "prompt": "a"}).status_code == 404
    assert http.get("/health").status_code == 200
