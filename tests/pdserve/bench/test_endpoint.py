"""A request's timeline is what the server did, on a real socket and a clock that the server moves."""

import asyncio
import json
import socket
from collections.abc import Sequence

import pytest

from pdserve.bench.load.dialect import Chat, Completions, Embeddings
from pdserve.bench.load.endpoint import Endpoint
from pdserve.bench.load.load_request import LoadRequest
from pdserve.bench.load.session import open_session
from pdserve.bench.load.timeline import Timeline
from tests.pdserve.bench.sse_server import (
    Answer,
    Requests,
    Sent,
    SteppedClock,
    completion,
    event,
    serving,
    streamed,
    usage,
)


def request(
    answer: Answer, make: type[Chat] | type[Completions] | type[Embeddings] = Completions
) -> tuple[Timeline, Requests]:
    """Send one request to a server with this answer."""

    async def run() -> tuple[Timeline, Requests]:
        clock = SteppedClock()
        async with (
            serving(lambda path: answer, clock) as (url, requested),
            open_session({"X-A": "b"}, 20.0, {}) as http,
        ):
            prompt = "hello" if make is Chat else (5, 6, 7)
            return await Endpoint(http, url, make("m", {"ignore_eos": True}), clock).send(
                LoadRequest(prompt, 9)
            ), requested

    return asyncio.run(run())


def test_times_are_those_of_the_pieces_and_counts_those_of_usage() -> None:
    line, requests = request(streamed([2.0, 0.5, 0.25, 1.5], prompt=11, tokens_per_piece=3))

    assert line.failure is None
    assert line.ttft_s == 2.0
    assert line.itls_s == (0.5, 0.25, 1.5)
    assert line.longest_gap_s == 1.5
    assert line.e2el_s == 4.25
    assert line.tpot_s == 2.25 / 11
    assert (line.input_len, line.output_len, line.text) == (11, 12, "w0 w1 w2 end")
    assert requests.paths == ["/v1/completions"]
    assert requests.headers[0]["x-a"] == "b"
    assert requests.bodies[0] == {
        "model": "m", "prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0.0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_a_role_is_not_a_token_but_reasoning_is() -> None:
    def delta(fields: dict[str, str], finish: str | None = None) -> bytes:
        return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})

    pieces = [
        Sent(1.0, delta({"role": "assistant", "content": ""})),
        Sent(1.0, delta({"reasoning_content": "hm "})),
        Sent(1.0, delta({"content": "yes"})),
        Sent(1.0, delta({}, "stop") + usage(3, 4)),
    ]

    line, requested = request(Answer(pieces), Chat)

    assert line.failure is None
    assert (line.ttft_s, line.itls_s, line.e2el_s) == (2.0, (1.0,), 4.0)
    assert line.text == "hm yes"
    assert requested.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert requested.bodies[0]["max_completion_tokens"] == 9


def test_an_event_may_arrive_in_pieces_and_among_comments() -> None:
    first = completion("a")
    pieces = [
        Sent(1.0, b": alive\r\n"),
        Sent(1.0, first[:9]),
        Sent(1.0, first[9:]),
        Sent(1.0, completion("b", "stop") + usage(1, 2)),
    ]

    line, _ = request(Answer(pieces))

    assert line.failure is None
    assert (line.text, line.itls_s) == ("ab", (1.0,))


def test_without_text_the_end_counts_as_the_only_piece() -> None:
    line, _ = request(Answer([Sent(1.0, completion("")), Sent(2.0, completion("", "length") + usage(1, 2))]))

    assert line.failure is None
    assert (line.ttft_s, line.e2el_s, line.output_len) == (3.0, 3.0, 2)


def test_vectors_have_an_end_and_no_tokens() -> None:
    whole = json.dumps({"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 3}}).encode()

    line, requests = request(Answer([Sent(1.5, whole)]), Embeddings)

    assert line.failure is None
    assert (line.e2el_s, line.pieces_s, line.input_len, line.output_len) == (1.5, (), 3, 0)
    assert requests.paths == ["/v1/embeddings"]
    assert requests.bodies == [{"model": "m", "input": [5, 6, 7], "ignore_eos": True}]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"object": "list"}', "no event: the response is not a list of vectors"),
        (b"{", "no event: "),
        (b'{"data": [], "usage": {"prompt_tokens": [7]}}', "no event: a part of the response has an unexpected form"),
        (b'{"data": []}', "no usage: the server sent no token counts"),
    ],
)
def test_an_answer_without_a_vector_is_a_failure(body: bytes, words: str) -> None:
    line, _ = request(Answer([Sent(1.0, body)]), Embeddings)

    assert str(line.failure).startswith(words)


@pytest.mark.parametrize(
    ("pieces", "status", "words"),
    [
        ([Sent(0, b'{"error": {"message": "queue full"}}')], 429, "HTTP 429: queue full"),
        ([Sent(0, b'{"detail": "no"}')], 422, "HTTP 422: no"),
        ([Sent(0, b"<html>down</html>")], 502, "HTTP 502: <html>down</html>"),
        ([Sent(1, completion("a")), Sent(0, event({"error": {"message": "lost"}}))], 200, "error in the stream: lost"),
        ([Sent(1, completion("a"))], 200, "broke off: the stream ended without a finish_reason"),
        ([Sent(1, completion("a", "stop") + b"data: [DONE]\n\n")], 200, "no usage: the server sent no token counts"),
        ([Sent(1, completion("a", "stop"))], 200, "no usage: the stream ended before the usage"),
        ([Sent(1, completion("a")), Sent(1, b"data: hm\n\n")], 200, "no event: "),
        ([Sent(1, completion("a")), Sent(1, b"data: 7\n\n")], 200, "no event: an event is not an object: 7"),
        (
            [Sent(1, event({"choices": [None]}))],
            200,
            "no event: a part of the response has an unexpected form: {'choices': [None]}",
        ),
        ([Sent(1, event({"choices": {"text": "a"}}))], 200, "no event: a part of the response has an unexpected form"),
        ([Sent(1, event({"choices": [{"text": 7}]}))], 200, "no event: a part of the response has an unexpected form"),
        (
            [Sent(1, event({"choices": [{"delta": {"content": ["a"]}}]}))],
            200,
            "no event: a part of the response has an unexpected form",
        ),
        (
            [Sent(1, event({"usage": {"prompt_tokens": [7]}}))],
            200,
            "no event: a part of the response has an unexpected form",
        ),
        ([Sent(1, completion("a")), Sent(1, None)], 200, "broke off: "),
    ],
)
def test_a_failure_is_in_the_timeline_with_its_kind(pieces: Sequence[Sent], status: int, words: str) -> None:
    line, _ = request(Answer(pieces, status))

    assert str(line.failure).startswith(words)


def test_a_refused_connection_is_a_failure() -> None:
    async def run() -> Timeline:
        clock = SteppedClock()
        async with serving(lambda path: streamed([1.0]), clock) as (url, _):
            pass
        async with open_session({}, 20.0, {}) as http:
            return await Endpoint(http, url, Completions("m"), clock).send(LoadRequest("a", 1))

    line = asyncio.run(run())

    assert line.failure is not None
    assert str(line.failure) == "no connection: Connection refused"


def test_a_deadline_is_a_failure_with_its_limit() -> None:
    async def run() -> Timeline:
        with socket.create_server(("127.0.0.1", 0)) as silent_server:  # the system accepts, nobody answers
            async with open_session({}, 0.05, {}) as http:
                url = f"http://127.0.0.1:{silent_server.getsockname()[1]}"
                return await Endpoint(http, url, Completions("m"), SteppedClock()).send(LoadRequest("a", 1))

    assert str(asyncio.run(run()).failure) == "deadline: no complete answer within 0.05 s"


def test_a_key_of_the_environment_is_sent_and_a_header_overrides_it() -> None:
    async def run(headers: dict[str, str], environ: dict[str, str]) -> str | None:
        clock = SteppedClock()
        async with serving(lambda path: streamed([1.0]), clock) as (url, requested):
            async with open_session(headers, 20.0, environ) as http:
                await Endpoint(http, url, Completions("m"), clock).send(LoadRequest("a", 1))
            return requested.headers[0].get("authorization")

    assert asyncio.run(run({}, {"OPENAI_API_KEY": "sk-1"})) == "Bearer sk-1"
    assert asyncio.run(run({}, {"OPENAI_API_KEY": "sk-1", "PDSERVE_API_KEY": "ours"})) == "Bearer ours"
    assert asyncio.run(run({"authorization": "Basic x"}, {"OPENAI_API_KEY": "sk-1"})) == "Basic x"
    assert asyncio.run(run({}, {})) is None
