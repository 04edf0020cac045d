"""POST /v1/responses over a scripted dispatcher: whole and streamed answers, each event of the official SDK's types."""

import dataclasses
import json
import weakref
from typing import Any

import orjson
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from scheduler.api.answer_options import AnswerOptions
from scheduler.api.answer_shape import PromptReport
from scheduler.api.choice_collector import ChoiceCollector
from scheduler.api.responses.response_shape import ResponseShape
from scheduler.request import GenerationRequest
from scheduler.text.pieces import TextPiece
from scheduler.tools.deltas import CallDelta
from testing.scheduler import scripted_dispatcher
from testing.scheduler.scripted_dispatcher import Line, Script
from tests.scheduler.test_tool_calls import ARGUMENTS, CALLED, ONE, TWO, ended
from wire.errors import InternalError, Overloaded

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NOW = {"type": "function", "name": "now"}
TOOLS = {"tools": [WEATHER, NOW]}
REQUIRED = TOOLS | {"tool_choice": "required"}
NAMED = TOOLS | {"tool_choice": {"type": "function", "name": "weather"}}
SCORED = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
PART_EVENTS = {"output_text": "text", "reasoning_text": "text", "function_call_arguments": "arguments"}


def checked(response: Any) -> Any:
    """Return a response that the official SDK takes, with each item as the type that it names."""
    read = Response.model_validate(response)
    assert [item.type for item in read.output] == [item["type"] for item in response["output"]]
    ids = [item["id"] for item in response["output"]]
    assert len(ids) == len(set(ids))
    return response


def events(text: str) -> list[Any]:
    """Return the events of a stream, numbered, each of the SDK's class for the type that its `event` line names."""
    found = []
    for part in text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert EVENT.validate_python(found[-1]).type == found[-1]["type"]
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


def joined(stream: list[Any]) -> Any:
    """Return the response that events join to; check that they agree with each other, and with the last one."""
    created, in_progress, *inner, last = stream
    response, item, streamed, logprobs = created["response"], dict[str, Any](), "", list[Any]()
    assert [created["type"], in_progress["type"]] == ["response.created", "response.in_progress"]
    assert (response["status"], response["output"], in_progress["response"]) == ("in_progress", [], response)
    for one in inner:
        place, (kind, did) = one.get("item_id"), one["type"].removeprefix("response.").split(".")
        assert one["output_index"] == len(response["output"]) - (kind != "output_item" or did == "done")
        assert place in (None, item.get("id"))
        match kind, did:
            case "output_item", "added":
                item, streamed, logprobs = one["item"], "", []
                assert (item["status"], item.get("content", []), item.get("arguments", "")) == ("in_progress", [], "")
                response["output"].append(item)
            case "content_part", "added":
                assert (item["content"], one["part"]["text"]) == ([], "")
                item["content"].append(one["part"])
            case "content_part", "done":
                assert one["part"] == item["content"][0]
            case "output_item", "done":
                status = one["item"]["status"]
                assert (one["item"], item["status"]) == (item | {"status": status}, "in_progress")
                item["status"] = status
            case _, "delta":
                streamed += one["delta"]
                logprobs += one.get("logprobs", [])
            case _, "done":
                field = PART_EVENTS[kind]
                target = item if field == "arguments" else item["content"][0]
                assert (streamed, logprobs) == (one[field], one.get("logprobs", []))
                target[field] = streamed
                if "logprobs" in target:
                    target["logprobs"] = logprobs
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["output"] == response["output"]
    return checked(last["response"])


CHANGING = ("id", "created_at", "completed_at")


def shown(response: Any) -> Any:
    """Return what does not differ between two answers to the same body."""
    output = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    return {name: value for name, value in response.items() if name not in CHANGING} | {"output": output}


async def answers(
    serve: Any, text: str, fields: Any = None, *, cut: int = 0, **options: Any
) -> tuple[Any, Any, GenerationRequest]:
    """Return the response, the one joined from a stream, and the request."""
    got: list[Any] = []
    script: Script = ended(text, got)
    if cut:
        script = lambda request, prompt, sequence: Line(got[0].ids(text)[:cut])  # noqa: E731
    async with serve(script, **options) as served:
        got.append(served)
        body = {"model": served.model, "input": "hello", "temperature": 0} | (fields or {})
        whole = await served.client.post("/v1/responses", json=body)
        assert whole.status_code == 200, whole.text
        stream = await served.client.post("/v1/responses", json=body | {"stream": True})
        assert stream.headers["content-type"].startswith("text/event-stream")
        return checked(whole.json()), joined(events(stream.text)), served.dispatcher.requests[0]


def message(text: str, status: str = "completed") -> dict[str, Any]:
    """Return a message, as `shown` returns it."""
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "role": "assistant", "status": status, "content": content}


def reasoning(text: str, status: str = "completed") -> dict[str, Any]:
    """Return reasoning, as `shown` returns it."""
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "status": status, "summary": [], "content": content, "encrypted_content": None}


def call(name: str = "weather", arguments: str = ARGUMENTS) -> dict[str, Any]:
    """Return a function call, as `shown` returns it."""
    return {"type": "function_call", "status": "completed", "name": name, "arguments": arguments}


@pytest.mark.covers("B.responses.1", "B.responses.2")
@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        ("hello world", {}, [message("hello world")]),
        ("", {}, [message("")]),
        ("hello 你好 world", {"input": [{"role": "user", "content": "hi"}]}, [message("hello 你好 world")]),
        ("a Paris b", {"stop": ["Paris"]}, [message("a ")]),
        (ONE, REQUIRED, [call()]),
        (TWO, REQUIRED, [call(), call("now", "{}")]),
        (TWO, REQUIRED | {"parallel_tool_calls": False}, [call()]),
        (ARGUMENTS, NAMED, [call()]),
        ("Sure. " + CALLED, TOOLS, [message("Sure. "), call()]),
        (CALLED + CALLED, TOOLS, [call(), call()]),
        (CALLED, TOOLS | {"tool_choice": "none"}, [message(CALLED)]),
        ("no tools", TOOLS | {"tool_choice": "auto"}, [message("no tools")]),
        ("no tools", {"tool_choice": "auto"}, [message("no tools")]),
    ],
)
async def test_an_answer_is_items_whole_and_streamed(serve: Any, text: str, fields: Any, expected: Any) -> None:
    whole, streamed, _ = await answers(serve, text, fields, tool_call_parser="hermes")

    assert shown(whole) == shown(streamed)
    assert shown(whole)["output"] == expected
    assert (whole["status"], whole["incomplete_details"], whole["error"]) == ("completed", None, None)
    assert (whole["object"], whole["id"][:5]) == ("response", "resp_")
    assert whole["completed_at"] >= whole["created_at"]


@pytest.mark.covers("B.responses.3")
@pytest.mark.parametrize(
    ("text", "fields", "cut", "expected"),
    [
        ("hm</think>hello", {}, 0, [reasoning("hm"), message("hello")]),
        ("hm</think>" + CALLED, TOOLS, 0, [reasoning("hm"), call()]),
        ("hm so", {}, 5, [reasoning("hm so", "incomplete")]),
        ("a</think>b<think>c</think>d", {}, 0, [reasoning("a"), message("b"), reasoning("c"), message("d")]),
        ("hello", {"reasoning": {"effort": "none"}}, 0, [message("hello")]),
        ("hm</think>hello", {"include_reasoning": False}, 0, [message("hello")]),
    ],
)
async def test_reasoning_is_an_item_before_the_answer(
    serve: Any, text: str, fields: Any, cut: int, expected: Any
) -> None:
    whole, streamed, _ = await answers(
        serve, text, fields, cut=cut, tool_call_parser="hermes", reasoning_parser="glm45"
    )

    assert shown(whole) == shown(streamed)
    assert shown(whole)["output"] == expected
    has_thought = "</think>" in text or bool(cut)
    assert (whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0) == has_thought


@pytest.mark.covers("B.responses.7")
@pytest.mark.parametrize(("text", "fields"), [("hello world", {}), (ONE, REQUIRED), ("Sure. " + CALLED, TOOLS)])
async def test_an_answer_cut_at_the_limit_is_incomplete(serve: Any, text: str, fields: Any) -> None:
    whole, streamed, _ = await answers(serve, text, fields, cut=6, tool_call_parser="hermes")

    assert shown(whole) == shown(streamed)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (whole["completed_at"], whole["output"][-1]["status"]) == (None, "incomplete")


@pytest.mark.covers("B.responses.7")
async def test_messages_are_returned_as_the_model_has_them(serve: Any) -> None:
    fields = {"enable_response_messages": True}
    whole, streamed, request = await answers(serve, "hm</think>hello", fields, reasoning_parser="glm45")

    assert shown(whole) == shown(streamed)
    (read,), (wrote,) = whole["input_messages"], whole["output_messages"]
    assert (read["type"], wrote["type"]) == ("raw_message_tokens",) * 2
    assert (read["tokens"], read["message"][:12]) == (list(request.prompts[0]), "<|im_start|>")
    assert wrote["message"].startswith("hm</think>hello<|im_end|>")
    assert len(wrote["tokens"]) == whole["usage"]["output_tokens"]


@pytest.mark.covers("B.responses.7")
@pytest.mark.parametrize(
    ("text", "num_messages"), [("hello world", 1), ("hm</think>hello", 1), ("a</think>b<think>c</think>d", 2)]
)
async def test_texts_have_the_logprobs_of_their_tokens(serve: Any, text: str, num_messages: int) -> None:
    whole, streamed, _ = await answers(serve, text, SCORED, reasoning_parser="glm45" if "</" in text else None)

    assert shown(whole) == shown(streamed)
    messages = [item["content"][0] for item in whole["output"] if item["type"] == "message"]
    assert len(messages) == num_messages
    for one in messages:
        assert one["text"] in "".join(entry["token"] for entry in one["logprobs"])
        assert all(len(entry["top_logprobs"]) == 2 for entry in one["logprobs"])


@pytest.mark.covers("B.responses.7")
async def test_usage_has_the_cached_tokens(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = dataclasses.replace(scripted_dispatcher.TIMES, cached_tokens=7, written_tokens=2)
    monkeypatch.setattr(scripted_dispatcher, "TIMES", times)
    whole, streamed, request = await answers(serve, "hello world")

    usage, num_prompt = whole["usage"], len(request.prompts[0])
    assert (usage["input_tokens"], usage["input_tokens_details"]) == (
        num_prompt,
        {"cached_tokens": 7, "cache_write_tokens": 2},
    )
    assert usage["total_tokens"] == num_prompt + usage["output_tokens"]
    assert usage == streamed["usage"]


@pytest.mark.covers("B.responses.9")
@pytest.mark.parametrize(
    ("error", "code"), [(InternalError("broken"), "server_error"), (Overloaded("full"), "rate_limit_exceeded")]
)
async def test_an_error_in_mid_stream_is_a_failed_response(serve: Any, error: Exception, code: str) -> None:
    async with serve("hello world") as served:
        served.dispatcher.fail_after, served.dispatcher.error = 1, error
        answer = await served.client.post("/v1/responses", json={"input": "hi", "stream": True})

    *before, last = events(answer.text)
    response = checked(last["response"])
    assert (before[2]["type"], last["type"]) == ("response.output_item.added", "response.failed")
    assert (response["status"], response["error"]["code"]) == ("failed", code)
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    assert "broken" not in response["error"]["message"]


async def test_an_error_before_the_first_event_has_its_status(serve: Any) -> None:
    async with serve() as served:
        served.dispatcher.refuse_with = Overloaded("full", 3)
        for stream in (False, True):
            answer = await served.client.post("/v1/responses", json={"input": "hi", "stream": stream})

            assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
            assert answer.json()["error"]["type"] == "rate_limit_error"


HEAD = {
    "id": "resp_1", "object": "response", "created_at": 1, "completed_at": None, "status": "in_progress", "error": None,
    "model": "tiny", "output": [], "usage": None, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
}  # fmt: skip


def begun(name: str, arguments: str, at: int = 0) -> TextPiece:
    """Return the piece with the first delta of a call."""
    return TextPiece(0, "", calls=(CallDelta(at, name, arguments, f"c{at}"),))


def more(arguments: str) -> TextPiece:
    """Return a piece with more arguments of a call."""
    return TextPiece(0, "", calls=(CallDelta(0, arguments=arguments),))


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([begun("f", ""), more('{"a"'), more(": 1}")], [call("f", '{"a": 1}')]),
        ([begun("f", ""), more("")], [call("f", "")]),
        ([begun("f", "{}"), TextPiece(0, "so", reasoning="hm")], [call("f", "{}"), reasoning("hm"), message("so")]),
        (
            [TextPiece(0, "a"), TextPiece(0, "b"), begun("f", "{}"), TextPiece(0, "c"), begun("g", "{}", 1)],
            [message("ab"), call("f", "{}"), message("c"), call("g", "{}")],
        ),
        ([begun("f", "{}"), begun("g", "{}", 1)], [call("f", "{}"), call("g", "{}")]),
    ],
)
def test_whole_and_stream_have_the_same_items(pieces: list[TextPiece], expected: Any) -> None:
    prompt = PromptReport((1,), ())
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, "prompt_tokens_details": None}
    shape, ended_pieces = ResponseShape(HEAD, b"origin", None), [*pieces, TextPiece(0, "", "stop")]
    collector = ChoiceCollector(shape, AnswerOptions(), [prompt], 1000)
    for piece in ended_pieces:
        collector.add(piece)
    whole = json.loads(orjson.dumps(shape.whole(collector.choices(), [prompt], usage)))
    sent = shape.opening(0, prompt, None) + b"".join(shape.event(piece, prompt, None) for piece in ended_pieces)
    streamed = joined(events((sent + shape.stream_format.frame(shape.usage_chunk(usage))).decode()))

    assert checked(whole)["output"] == streamed["output"]
    assert shown(whole)["output"] == expected


def test_a_shape_leaves_nothing_to_the_garbage_collector() -> None:
    shape = ResponseShape(HEAD, b"origin", None)
    shape.stream_format.frame({"type": "response.completed"})
    alive = weakref.ref(shape)

    del shape
    assert alive() is None


def test_a_failure_before_the_first_piece_opens_the_stream() -> None:
    shape = ResponseShape(HEAD, b"origin", None)
    error = {"error": {"message": "late", "type": "timeout_error", "param": None, "code": 504}}

    kinds = [one["type"] for one in events(shape.stream_format.frame(error).decode())]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]
