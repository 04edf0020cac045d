"""POST /v1/messages over a scripted dispatcher: whole and streamed answers, their blocks, stops and usage."""

import dataclasses
import json
from typing import Any

import orjson
import pytest
from tokenizers import AddedToken, Tokenizer

from scheduler.api.answer_options import AnswerOptions
from scheduler.api.answer_shape import PromptReport
from scheduler.api.anthropic.message_shape import MessageShape
from scheduler.api.choice_collector import ChoiceCollector
from scheduler.request import GenerationRequest
from scheduler.text.pieces import TextPiece
from scheduler.tools.deltas import CallDelta
from testing.scheduler import scripted_dispatcher
from testing.scheduler.scripted_dispatcher import Line, Script
from tests.scheduler.test_tool_calls import ARGUMENTS, CALLED, ONE, TWO, ended
from wire.errors import InternalError

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_renderer")]

USER = {"role": "user", "content": "hello"}
WEATHER = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NOW = {"name": "now", "input_schema": {"type": "object"}}
PARIS = {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}}
TOOLS = {"tools": [WEATHER, NOW]}
ANY = TOOLS | {"tool_choice": {"type": "any"}}
NAMED = TOOLS | {"tool_choice": {"type": "tool", "name": "weather"}}


def events(text: str) -> list[Any]:
    """Return the events of a stream, each of the type that its `event` line names."""
    found = []
    for part in text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def message_of(stream: list[Any]) -> Any:
    """Return the message that Anthropic's clients assemble from the events."""
    start, *inner, delta, stop = stream
    assert (start["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message, texts = start["message"], ""
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    for one in inner:
        block: Any = message["content"][-1] if message["content"] else None
        match one["type"]:
            case "content_block_start":
                assert one["index"] == len(message["content"])
                message["content"].append(one["content_block"])
                texts = ""
            case "content_block_delta":
                assert (one["index"], block is not None) == (len(message["content"]) - 1, True)
                kind, *texts_of = one["delta"].values()
                names = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
                if kind == "input_json_delta":
                    texts += texts_of[0]
                else:
                    block[names[kind]] += texts_of[0]
            case "content_block_stop":
                assert one["index"] == len(message["content"]) - 1
                if texts:
                    block["input"] = json.loads(texts)
            case other:
                pytest.fail(f"{other} within a message")
    return message | delta["delta"] | {"usage": delta["usage"]}


def shown(message: Any) -> Any:
    """Return what does not differ between two answers to the same body."""
    blocks = [
        {name: value for name, value in block.items() if name not in ("id", "signature")}
        for block in message["content"]
    ]
    return blocks, message["stop_reason"], message["stop_sequence"]


async def answers(
    serve: Any, text: str, fields: Any = None, *, cut: int = 0, **options: Any
) -> tuple[Any, Any, GenerationRequest]:
    """Return the message, the one joined from a stream, and the request."""
    got: list[Any] = []
    script: Script = ended(text, got)
    if cut:
        script = lambda request, prompt, sequence: Line(got[0].ids(text)[:cut])  # noqa: E731
    async with serve(script, **options) as served:
        got.append(served)
        body = {"model": served.model, "max_tokens": 300, "messages": [USER], "temperature": 0} | (fields or {})
        whole = await served.client.post("/v1/messages", json=body)
        assert whole.status_code == 200, whole.text
        stream = await served.client.post("/v1/messages", json=body | {"stream": True})
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.headers["request-id"] == stream.headers["x-request-id"]
        return whole.json(), message_of(events(stream.text)), served.dispatcher.requests[0]


def text_block(text: str) -> dict[str, str]:
    """Return a block of text."""
    return {"type": "text", "text": text}


@pytest.mark.covers("B.messages.1", "B.messages.2")
@pytest.mark.parametrize(
    ("text", "fields", "cut", "expected"),
    [
        ("hello world", {}, 0, ([text_block("hello world")], "end_turn", None)),
        ("", {}, 0, ([text_block("")], "end_turn", None)),
        ("hello 你好 world", {}, 5, None),
        ("a Paris b", {"stop_sequences": ["x", "Paris"]}, 0, ([text_block("a ")], "stop_sequence", "Paris")),
        (ONE, ANY, 0, ([PARIS], "tool_use", None)),
        (TWO, ANY, 0, ([PARIS, {"type": "tool_use", "name": "now", "input": {}}], "tool_use", None)),
        (ARGUMENTS, NAMED, 0, ([PARIS], "tool_use", None)),
        ("Sure. " + CALLED, TOOLS, 0, ([text_block("Sure. "), PARIS], "tool_use", None)),
        (CALLED + CALLED, TOOLS, 0, ([PARIS, PARIS], "tool_use", None)),
        (CALLED, TOOLS | {"tool_choice": {"type": "none"}}, 0, ([text_block(CALLED)], "end_turn", None)),
        ("no tools", TOOLS | {"tool_choice": {"type": "auto"}}, 0, ([text_block("no tools")], "end_turn", None)),
    ],
)
async def test_an_answer_is_blocks_whole_and_streamed(
    serve: Any, text: str, fields: Any, cut: int, expected: Any
) -> None:
    whole, streamed, _ = await answers(serve, text, fields, cut=cut, tool_call_parser="hermes")

    assert shown(whole) == shown(streamed)
    assert expected is None or shown(whole) == expected
    assert (expected is None) is (whole["stop_reason"] == "max_tokens")
    assert (whole["type"], whole["role"], whole["id"][:4]) == ("message", "assistant", "msg-")
    assert whole["usage"] == streamed["usage"]


def thought(text: str) -> dict[str, str]:
    """Return a block of thinking, as `shown` returns it."""
    return {"type": "thinking", "thinking": text}


@pytest.mark.covers("B.messages.3")
@pytest.mark.parametrize(
    ("text", "fields", "cut", "expected"),
    [
        ("hm</think>hello", {}, 0, ([thought("hm"), text_block("hello")], "end_turn", None)),
        ("hm</think>" + CALLED, TOOLS, 0, ([thought("hm"), PARIS], "tool_use", None)),
        ("hm so", {}, 5, ([thought("hm so")], "max_tokens", None)),
        ("hm x</think>a x", {"stop_sequences": ["x"]}, 0, ([thought("hm x"), text_block("a ")], "stop_sequence", "x")),
        (
            "a</think>b<think>c</think>d", {}, 0,
            ([thought("a"), text_block("b"), thought("c"), text_block("d")], "end_turn", None),
        ),
        (
            f"a</think>b<think>c{CALLED}", TOOLS, 0,
            ([thought("a"), text_block("b"), thought("c"), PARIS], "tool_use", None),
        ),
        ("hello", {"thinking": {"type": "disabled"}}, 0, ([text_block("hello")], "end_turn", None)),
    ],
)  # fmt: skip
async def test_thinking_is_a_block_before_the_answer(
    serve: Any, text: str, fields: Any, cut: int, expected: Any
) -> None:
    whole, streamed, _ = await answers(
        serve, text, fields, cut=cut, tool_call_parser="hermes", reasoning_parser="glm45"
    )

    assert shown(whole) == shown(streamed) == expected
    signed = [one["signature"] for one in (*whole["content"], *streamed["content"]) if one["type"] == "thinking"]
    assert [len(one) for one in signed] == [64] * len(set(signed))
    assert (whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0) == bool(signed)


@pytest.mark.parametrize(
    ("parser", "kind", "budget"),
    [
        ("qwen3", "enabled", 10), ("qwen3", "disabled", None), ("qwen3", "adaptive", None), (None, "enabled", None),
        ("granite", "enabled", None), ("openai_gptoss", "enabled", None),
    ],
)  # fmt: skip
async def test_a_budget_of_thinking_needs_a_parser_to_count(
    serve: Any, make_model: Any, parser: str | None, kind: str, budget: int | None
) -> None:
    folder = make_model()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"thinking": {"type": kind, "budget_tokens": 10}}
    _, _, request = await answers(serve, "hm</think>hello", fields, folder=folder, reasoning_parser=parser)

    assert (request.params.thinking and request.params.thinking.budget) == budget


@pytest.mark.covers("B.messages.2")
@pytest.mark.parametrize("only_one", [False, True])
@pytest.mark.parametrize(("text", "choice"), [(TWO, "any"), (CALLED + CALLED, "auto")])
async def test_parallel_tool_use_can_be_disabled(serve: Any, text: str, choice: str, only_one: bool) -> None:
    fields = TOOLS | {"tool_choice": {"type": choice, "disable_parallel_tool_use": only_one}}
    whole, streamed, _ = await answers(serve, text, fields, tool_call_parser="hermes")

    assert shown(whole) == shown(streamed)
    assert len(whole["content"]) == (1 if only_one else 2)


@pytest.mark.covers("B.messages.2")
async def test_a_call_cut_by_max_tokens_has_the_input_so_far(serve: Any) -> None:
    got: list[Any] = []
    inputs: list[Any] = []
    text = ONE.replace(ARGUMENTS, '{"city": "Paris", "days": [1, 2]}')
    async with serve(lambda request, prompt, sequence: Line(got[0].ids(text))) as served:
        got.append(served)
        for max_tokens in range(20, 90):
            body = {"max_tokens": max_tokens, "messages": [USER]} | ANY
            message = (await served.client.post("/v1/messages", json=body)).json()
            if (block := message["content"][0])["type"] == "tool_use":
                assert message["stop_reason"] == "max_tokens"
                inputs += [block["input"]] if block["input"] not in inputs[-1:] else []

    assert inputs == [
        {}, {"city": "Paris"}, {"city": "Paris", "days": []}, {"city": "Paris", "days": [1]},
        {"city": "Paris", "days": [1, 2]},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "expected", "joined"),
    [
        ("nothing", {}, {}), ("[1]", {}, {}), (' \n "x"', {}, {}), (' \n{"a": 1}', {"a": 1}, {"a": 1}),
        ('{"a": NaN}', {}, None), ('{"a": 1e999}', {}, None),
        ('{"a": 1' + "0" * 30 + "}", {"a": 10**30}, {"a": 10**30}),
    ],
)  # fmt: skip
async def test_malformed_arguments_are_an_answer_too(serve: Any, arguments: str, expected: Any, joined: Any) -> None:
    call = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    whole, streamed, _ = await answers(serve, call, TOOLS, tool_call_parser="hermes")

    assert whole["content"][0]["input"] == expected
    assert joined is None or streamed["content"][0]["input"] == joined


@pytest.mark.covers("B.messages.7")
@pytest.mark.parametrize("written", [2, 1000], ids=["once", "again by a later try"])
async def test_usage_separates_what_was_cached(serve: Any, monkeypatch: pytest.MonkeyPatch, written: int) -> None:
    times = dataclasses.replace(scripted_dispatcher.TIMES, cached_tokens=7, written_tokens=written)
    monkeypatch.setattr(scripted_dispatcher, "TIMES", times)
    whole, streamed, request = await answers(serve, "hello world")

    num_prompt = len(request.prompts[0])
    usage, created = whole["usage"], min(written, num_prompt - 7)
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (7, created)
    assert usage["input_tokens"] + 7 + created == num_prompt
    assert usage == streamed["usage"]


@pytest.mark.covers("B.messages.7")
async def test_count_tokens_is_the_prompt_of_the_same_body(serve: Any) -> None:
    async with serve("hi", tool_call_parser="hermes") as served:
        for fields in ({}, {"system": "Be brief."}, TOOLS, {"messages": [USER, {"role": "assistant", "content": "I"}]}):
            body = {"messages": [USER]} | fields
            counted = await served.client.post("/v1/messages/count_tokens", json=body)
            answer = await served.client.post("/v1/messages", json=body | {"max_tokens": 4})

            assert counted.json() == {"input_tokens": answer.json()["usage"]["input_tokens"]}
            assert counted.json()["input_tokens"] == len(served.dispatcher.requests[-1].prompts[0])


@pytest.mark.covers("B.messages.6")
async def test_an_error_in_mid_stream_is_an_event(serve: Any) -> None:
    async with serve("hello world") as served:
        served.dispatcher.fail_after, served.dispatcher.error = 1, InternalError("broken")
        body = {"max_tokens": 9, "messages": [USER], "stream": True}
        response = await served.client.post("/v1/messages", json=body, headers={"x-request-id": "mine"})

        *before, error = events(response.text)
        assert [one["type"] for one in before[:2]] == ["message_start", "content_block_start"]
        assert (error["type"], error["error"]["type"], error["request_id"]) == ("error", "api_error", "mine")
        assert "broken" not in error["error"]["message"]


SECOND_CALL = TextPiece(0, "", calls=(CallDelta(1, "f", '{"a": 1}', "c2"),))


def call_pieces(*arguments: str) -> list[TextPiece]:
    """Return the pieces of a call whose arguments arrive one by one."""
    begun = TextPiece(0, "", calls=(CallDelta(0, "weather", call_id="c1"),))
    return [begun, *(TextPiece(0, "", calls=(CallDelta(0, arguments=one),)) for one in arguments)]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (call_pieces("", " \n", ' {"city"', ': "Paris"}'), [PARIS]),
        (call_pieces(" ", "\n[", '{"city": "Paris"}]'), [PARIS | {"input": {}}]),
        (
            [*call_pieces('{"city": "Paris"}'), TextPiece(0, "so", reasoning="hm")],
            [PARIS, thought("hm"), text_block("so")],
        ),
        (
            [TextPiece(0, "a"), TextPiece(0, "b"), *call_pieces("\t1"), TextPiece(0, "c"), SECOND_CALL],
            [text_block("ab"), PARIS | {"input": {}}, text_block("c"), PARIS | {"name": "f", "input": {"a": 1}}],
        ),
    ],
)  # fmt: skip
def test_whole_and_stream_have_the_same_blocks(pieces: list[TextPiece], expected: Any) -> None:
    prompt, usage = PromptReport((1,), ()), {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": None}
    shape, ended_pieces = MessageShape("msg-1", "tiny"), [*pieces, TextPiece(0, "", "stop")]
    collector = ChoiceCollector(shape, AnswerOptions(), [prompt], 1000)
    for piece in ended_pieces:
        collector.add(piece)
    whole = json.loads(orjson.dumps(shape.whole(collector.choices(), [prompt], usage)))
    sent = shape.opening(0, prompt, None) + b"".join(shape.event(piece, prompt, None) for piece in ended_pieces)
    last = MessageShape.stream_format.frame(shape.usage_chunk(usage)) + MessageShape.stream_format.end
    streamed = message_of(events((sent + last).decode()))

    assert whole == streamed
    assert shown(whole)[0] == expected


def test_a_quiet_stream_has_pings() -> None:
    assert events(MessageShape.stream_format.comment.decode()) == [{"type": "ping"}]
