"""The small HTTP client against a real server of the standard library."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.client import Client, Sample, parse_metrics
from pdserve.question import AnswerTimes, ask, served_model
from tests.pdserve.quiet_server import QuietHandler, serving
from wire.errors import Unavailable

_EVENTS: list[dict[str, Any]] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "Par"}}]},
    {"choices": [{"delta": {"content": "is"}, "finish_reason": "stop"}]},
    {
        "choices": [],
        "usage": {"completion_tokens": 2},
        "pdserve": {"stages_ms": {"send": 1.5}, "kv_bytes": 1024, "transport": "shm"},
    },
]


class _Handler(QuietHandler):
    def do_GET(self) -> None:
        bodies = {"/v1/models": {"data": [{"id": "m"}]}, "/none": {"data": []}}
        self.answer(200, json.dumps(bodies.get(self.path, {})).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] == "unknown":
            self.answer(404, b'{"error": {"message": "no such model"}}')
        elif body["model"] == "breaks":
            self.answer(200, b'data: {"error": {"message": "the instance is gone"}}\n\n')
        elif body["model"] == "silent":
            self.answer(200, b"data: [DONE]\n\n")
        else:
            self.answer(200, b"".join(b"data: %s\n\n" % json.dumps(e).encode() for e in _EVENTS) + b"data: [DONE]\n\n")


@pytest.fixture
def client() -> Iterator[Client]:
    with serving(_Handler) as url:
        yield Client(url)


def test_a_question_is_answered_piece_by_piece_with_its_figures(client: Client) -> None:
    pieces: list[str] = []
    clock = iter([0.0, 0.5, 1.0])

    times = ask(client, served_model(client), "Where?", pieces.append, lambda: next(clock))

    assert pieces == ["Par", "is"]
    assert (times.ttft_s, times.tokens, times.tokens_per_s) == (0.5, 2, 2.0)
    assert str(times) == "TTFT 500 ms, 2 tokens, 2.0 tokens/s; KV hop: 1,024 bytes in 1.5 ms over shm"


@pytest.mark.parametrize(
    ("model", "words"),
    [("unknown", "HTTP 404: no such model"), ("breaks", "the instance is gone"), ("silent", "the answer had no text")],
)
def test_a_failed_answer_is_quoted(client: Client, model: str, words: str) -> None:
    with pytest.raises(Unavailable, match=words):
        ask(client, model, "Where?", lambda text: None)


def test_the_share_of_sending_hidden_by_the_overlap_is_reported() -> None:
    times = AnswerTimes(0.5, 2, 2.0, kv_bytes=1000, hop_ms=1.5, transport="tcp", early_bytes=875)

    assert str(times).endswith("KV hop: 1,000 bytes in 1.5 ms over tcp, 88% of them during prefill")


def test_a_refused_connection_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        Client("http://127.0.0.1:1").get("/")


def test_metrics_are_read_with_their_labels() -> None:
    page = '# HELP x y\nx{instance="127.0.0.1:1",a="b\\"c"} 3.0\nplain 1e3\n'

    assert parse_metrics(page) == (
        Sample("x", {"instance": "127.0.0.1:1", "a": 'b\\"c'}, 3.0),
        Sample("plain", {}, 1000.0),
    )


@pytest.mark.parametrize(
    ("environ", "key"),
    [
        ({}, None),
        ({"VLLM_API_KEY": "theirs"}, "theirs"),
        ({"PDSERVE_API_KEY": "first\nsecond", "VLLM_API_KEY": "theirs"}, "first"),
        ({"PDSERVE_API_KEY": " \n", "VLLM_API_KEY": "theirs"}, "theirs"),
    ],
)
def test_the_environments_key_is_sent(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], key: str | None
) -> None:
    for name in ("PDSERVE_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    seen: list[str | None] = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            self.answer(200, b"")

    with serving(Handler) as url:
        Client(url).get("/v1/models")

    assert seen == [None if key is None else f"Bearer {key}"]
