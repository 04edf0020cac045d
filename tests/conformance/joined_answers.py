"""Answers of each API in one form: a stream, joined, is the whole answer. Fails where a stream ends twice or never."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.conformance.route_table import GENERATE
from tests.scheduler.test_responses import events as response_events
from tests.scheduler.test_responses import joined as joined_response

Json = dict[str, Any]


@dataclass
class Answer:
    """`shown` must be the same however it was served, `numbers` nearly so; `served` reports how it was."""

    shown: Json
    numbers: list[float] = field(default_factory=list)
    served: Json = field(default_factory=dict)


def whole_answer(route: str, body: Json) -> Answer:
    """Return a complete answer."""
    if route.endswith("/messages"):
        return Answer(_shown_message(body, body["content"], body["usage"]))
    if route.endswith("/responses"):
        return Answer(_shown_response(body))
    if "choices" not in body:
        return _vectors(body)
    shown, numbers = _shown_choices(body["choices"])
    return Answer({"id": _id(body), "choices": shown, "usage": body["usage"]}, numbers)


def joined_answer(route: str, text: str) -> Answer:
    """Return what a stream's events join to."""
    if route.endswith("/responses"):
        found = response_events(text)
        return Answer(_shown_response(joined_response(found)), [], found[-1]["pdserve"])
    if route == GENERATE:
        return _joined_texts(text)
    frames = [frame.split("\n") for frame in text.split("\n\n") if frame]
    events = [line.removeprefix("data: ") for frame in frames for line in frame if line.startswith("data: ")]
    if route.endswith("/messages"):
        return _joined_message([json.loads(event) for event in events])
    assert (events.count("[DONE]"), events[-1]) == (1, "[DONE]")
    return _joined_choices([json.loads(event) for event in events[:-1]])


def _joined_texts(text: str) -> Answer:
    *frames, rest = text.split("\0")
    assert rest == ""
    texts: list[list[str]] = [json.loads(frame)["text"] for frame in frames]
    for before, after in itertools.pairwise(texts):
        assert all(now.startswith(known) for known, now in zip(before, after, strict=True))
    return Answer({"text": texts[-1]})


def _joined_choices(chunks: Sequence[Json]) -> Answer:
    *parts, last = chunks
    assert last["choices"] == []
    assert len({_id(part) for part in chunks}) == 1
    joined: dict[int, Json] = {}
    for part in parts:
        (new,) = part["choices"]
        begun: Json = {"message": {}, "text": "", "logprobs": [], "token_ids": [], "finish_reason": None}
        choice = joined.setdefault(new["index"], begun)
        assert choice["finish_reason"] is None, f"{new} follows the end of its choice"
        choice["text"] += new.get("text", "")
        choice["logprobs"] += _logprobs(new)
        choice["token_ids"] += new.get("token_ids") or []
        choice |= {name: new.get(name) for name in ("finish_reason", "stop_reason")}
        _add_delta(choice["message"], new.get("delta", {}))
    assert all(choice["finish_reason"] is not None for choice in joined.values())
    shown, numbers = _shown_choices([joined[index] for index in sorted(joined)])
    return Answer({"id": _id(last), "choices": shown, "usage": last["usage"]}, numbers, last["pdserve"])


def _id(body: Json) -> Any:
    return body.get("id") or body["request_id"]


def _add_delta(message: Json, delta: Json) -> None:
    for name in ("content", "reasoning", "reasoning_content"):
        message[name] = message.get(name, "") + (delta.get(name) or "")
    for new in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        if new["index"] == len(calls):
            assert new["type"] == "function"
            calls.append({"id": new["id"], "function": new["function"] | {"arguments": ""}})
        else:
            assert new.keys() == {"index", "function"}, f"only the first delta of a call has its id and name: {new}"
            assert new["function"].keys() == {"arguments"}
        calls[-1]["function"]["arguments"] += new["function"].get("arguments", "")
    if "function_call" in delta:
        call = message.setdefault("function_call", {"arguments": ""})
        arguments = call["arguments"] + delta["function_call"].get("arguments", "")
        call |= delta["function_call"] | {"arguments": arguments}


def _shown_choices(choices: Iterable[Json]) -> tuple[list[Json], list[float]]:
    shown, numbers = [], list[float]()
    for choice in choices:
        message = choice.get("message") or {}
        calls = [{"id": one["id"], **one["function"]} for one in message.get("tool_calls") or ()]
        shown.append({
            "text": message.get("content") or choice.get("text") or "", "reasoning": message.get("reasoning") or "",
            "calls": calls, "function_call": message.get("function_call"), "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"], "token_ids": choice.get("token_ids") or [],
        })  # fmt: skip
        assert (message.get("reasoning") or "") == (message.get("reasoning_content") or "")
        logprobs = choice.get("logprobs")
        numbers += logprobs if isinstance(logprobs, list) else _logprobs(choice)
    return shown, numbers


def _logprobs(choice: Json) -> list[float]:
    logprobs = choice.get("logprobs") or {}
    if "token_logprobs" in logprobs:
        return list(logprobs["token_logprobs"])
    return [number for one in logprobs.get("content") or () for number in _logprobs_of(one)]


def _logprobs_of(token: Json) -> list[float]:
    return [token["logprob"], *(other["logprob"] for other in token["top_logprobs"])]


def _joined_message(events: Sequence[Json]) -> Answer:
    start, *middle, end, stop = [event for event in events if event["type"] != "ping"]
    assert (start["type"], end["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    blocks: list[Json] = []
    is_open = False
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert (is_open, event["index"]) == (False, len(blocks))
                blocks.append(event["content_block"] | {"partial_json": ""})
                is_open = True
            case "content_block_delta":
                assert (is_open, event["index"]) == (True, len(blocks) - 1)
                for name in event["delta"].keys() - {"type"}:
                    blocks[-1][name] = blocks[-1].get(name, "") + event["delta"][name]
            case "content_block_stop":
                assert (is_open, event["index"]) == (True, len(blocks) - 1)
                is_open = False
            case other:
                raise AssertionError(other)
    assert not is_open
    for block in blocks:
        if arguments := block.pop("partial_json"):
            block["input"] = json.loads(arguments)
    return Answer(_shown_message(start["message"] | end["delta"], blocks, end["usage"]), [], end.get("pdserve", {}))


def _shown_message(message: Json, blocks: list[Json], usage: Json) -> Json:
    shown = {name: message[name] for name in ("id", "role", "stop_reason", "stop_sequence")}
    counts = usage | {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    return shown | {"blocks": blocks, "usage": {key: counts[key] for key in counts if "cache" not in key}}


def _shown_response(response: Json) -> Json:
    """Return a response without its times. Ids of one that is kept name its store, so they are left out too."""
    shown = {name: value for name, value in response.items() if name not in ("created_at", "completed_at")}
    if not response["store"]:
        return shown
    output = [{name: value for name, value in item.items() if "id" not in name} for item in shown["output"]]
    return {name: value for name, value in shown.items() if name != "id"} | {"output": output}


def _vectors(body: Json) -> Answer:
    kept = {name: value for name, value in body.items() if name not in ("id", "created")}
    numbers: list[float] = []
    return Answer(_without_numbers(kept, numbers), numbers)


def _without_numbers(value: Any, numbers: list[float]) -> Any:
    """Return the value with None for each fraction, which is added to `numbers`."""
    if isinstance(value, dict):
        return {name: _without_numbers(one, numbers) for name, one in sorted(value.items())}
    if isinstance(value, list):
        return [_without_numbers(one, numbers) for one in value]
    if isinstance(value, float):
        numbers.append(value)
        return None
    return value
