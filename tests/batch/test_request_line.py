"""An invalid request is refused with a message; a valid one is sent as its line has it."""

import json
from typing import Any

import pytest

from batch.request_line import ENDPOINTS, LineRefused, request_of
from tests.batch.scripted import line

MANY = (
    "Supported endpoints: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, "
    "/v1/embeddings, /v2/embed, /v1/score, /score, /rerank, /v1/rerank, /v2/rerank, /classify, /pooling"
)


@pytest.mark.parametrize("url", ENDPOINTS)
def test_each_endpoint_gets_the_lines_body(url: str) -> None:
    body = {"model": "m", "temperature": 0.1, "seed": 2**53 + 1, "stop": ["é", "\U0001f600"], "n": None}

    request = request_of(line(0, url=url, body=body))

    assert request.path == url
    assert json.loads(request.body) == body


@pytest.mark.parametrize(
    ("changes", "words", "param"),
    [
        ({"url": "/bad_url"}, f"URL /bad_url is not a supported endpoint. {MANY}", "url"),
        ({"url": "/V1/completions"}, f"URL /V1/completions is not a supported endpoint. {MANY}", "url"),
        ({"url": "http://h/v1/completions"}, f"URL http://h/v1/completions is not a supported endpoint. {MANY}", "url"),
        ({"url": "/metrics"}, f"URL /metrics is not a supported endpoint. {MANY}", "url"),
        ({"url": None}, f"URL (none) is not a supported endpoint. {MANY}", "url"),
        ({"url": ["/score"]}, f"URL (a JSON array) is not a supported endpoint. {MANY}", "url"),
        ({"url": "/" + "x" * 1000}, f"URL /{'x' * 127}… is not a supported endpoint. {MANY}", "url"),
        ({"method": "GET"}, "method GET is not supported: the method must be POST", "method"),
        ({"method": "post"}, "method post is not supported: the method must be POST", "method"),
        ({"method": 1}, "method (a JSON number) is not supported: the method must be POST", "method"),
        ({"body": []}, "the line's body is a JSON array, not an object", "body"),
        ({"body": None}, "the line's body is a JSON null, not an object", "body"),
        ({"body": "{}"}, "the line's body is a JSON string, not an object", "body"),
        ({"body": {"stream": True}}, "Request must not be sent in stream mode", "stream"),
        ({"body": {"stream": "yes"}}, "Request must not be sent in stream mode", "stream"),
        ({"body": {"stream": 1}}, "Request must not be sent in stream mode", "stream"),
        ({"body": {"background": True}}, "Request must not run in the background", "background"),
        (
            {"body": {"encoding_format": "bytes"}},
            "encoding_format must be float or base64: a line's answer is JSON",
            "encoding_format",
        ),
    ],
)
def test_an_invalid_request_line_is_refused(changes: dict[str, Any], words: str, param: str) -> None:
    with pytest.raises(LineRefused) as refused:
        request_of(line(0, **changes))

    assert (str(refused.value), refused.value.param) == (words, param)


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    deep: Any = 1
    for _ in range(500):
        deep = [deep]

    with pytest.raises(LineRefused, match="nested deeper than 250 levels"):
        request_of(line(0, body={"deep": deep}))


@pytest.mark.parametrize("missing", ["url", "method", "body"])
def test_missing_keys_are_refused(missing: str) -> None:
    request = line(0)
    del request[missing]

    with pytest.raises(LineRefused) as refused:
        request_of(request)
    assert refused.value.param == missing


@pytest.mark.parametrize("stream", [False, None])
def test_stream_false_is_accepted(stream: bool | None) -> None:
    assert request_of(line(0, body={"stream": stream})).body
