"""Answers of Anthropic's Messages API: a message of content blocks, and the events of its stream.

message_start, (content_block_start, content_block_delta…, content_block_stop)…, message_delta, message_stop
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic_core import from_json

from scheduler.api.answer_shape import CompleteChoice, PromptReport, Usage
from scheduler.api.sse import SSE, StreamFormat
from scheduler.text.pieces import TextPiece
from scheduler.tools.deltas import CallDelta


def _event(body: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), orjson.dumps(body))


_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
_EMPTY = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}}
_BLANK = " \t\r\n"


class MessageShape:
    """Builds one message, whole or as events. Mutable while it streams. Implements AnswerShape."""

    stream_format = StreamFormat(
        SSE.headers, _event, comment=_event({"type": "ping"}), end=_event({"type": "message_stop"})
    )  # fmt: skip

    def __init__(self, answer_id: str, model: str) -> None:
        self._head = {"id": answer_id, "type": "message", "role": "assistant", "model": model}
        self._num_blocks = 0  # closed blocks
        self._block = ""  # the type of the open block, empty if none is open
        self._before = b""  # the bytes of a delta of the open block, up to its text
        self._has_calls = False
        self._has_input: bool | None = None  # whether the open call's arguments are an object, None before they begin
        self._end: dict[str, Any] = {}

    def opening(self, index: int, prompt: PromptReport, usage: Usage | None) -> bytes:
        """Return message_start; how much of the prompt was cached is known only at the end."""
        usage = _token_counts(len(prompt.token_ids), 0, 0)
        message = self._head | {"content": []} | _stop(None, None) | {"usage": usage}
        return _event({"type": "message_start", "message": message})

    def event(self, piece: TextPiece, prompt: PromptReport, usage: Usage | None) -> bytes:
        """Return the events that carry `piece`."""
        events = self._text("thinking", piece.reasoning) if piece.reasoning else b""
        if piece.text:
            events += self._text("text", piece.text)
        for call in piece.calls:
            events += self._call(call)
        if piece.finish_reason is None:
            return events
        if not self._num_blocks and not self._block:
            events += self._open("text", _EMPTY["text"])
        self._end = _stop_of(piece.finish_reason, piece.stop_reason, has_calls=self._has_calls)
        return events + self._close()

    def logprobs(self, piece: TextPiece, prompt: PromptReport) -> None:
        """Return None: this API has no log probabilities."""

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Return message_delta."""
        return {"type": "message_delta", "delta": self._end, "usage": _usage(usage)}

    def whole(self, choices: list[CompleteChoice], prompts: Sequence[PromptReport], usage: Usage) -> dict[str, Any]:
        """Return the complete message."""
        (choice,) = choices
        calls, blocks = iter(choice.calls), list[dict[str, Any]]()
        for at, (kind, text) in enumerate(choice.blocks):
            match kind:
                case "thinking":
                    blocks.append({"type": kind, "thinking": text, "signature": self._signature(at)})
                case "text":
                    blocks.append({"type": kind, "text": text})
                case _:
                    call = next(calls)
                    blocks.append(_tool_use(call) | {"input": _input(call.arguments)})
        stop = _stop_of(choice.finish_reason, choice.stop_reason, has_calls=bool(choice.calls))
        content = blocks or [{"type": "text", "text": ""}]  # clients read the first block unchecked
        return self._head | {"content": content} | stop | {"usage": _usage(usage)}

    def _text(self, kind: str, text: str) -> bytes:
        opened = b"" if self._block == kind else self._open(kind, _EMPTY[kind])
        return opened + self._before + orjson.dumps(text) + b"}}\n\n"

    def _call(self, call: CallDelta) -> bytes:
        opened, text = b"", call.arguments
        if call.name is not None:
            self._has_calls, self._has_input = True, None
            opened = self._open("tool_use", _tool_use(call) | {"input": {}})
        if self._has_input is None and (text := text.lstrip(_BLANK)):
            self._has_input = text[0] == "{"
        return opened + self._before + orjson.dumps(text) + b"}}\n\n" if text and self._has_input else opened

    def _open(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        """Return the events that close the open block and open one of this type."""
        closed = self._close()
        self._block = kind
        name, key = ("input_json_delta", "partial_json") if kind == "tool_use" else (f"{kind}_delta", kind)
        self._before = _DELTA % (self._num_blocks, name.encode(), key.encode())
        block = {"type": kind, **fields}
        return closed + _event({"type": "content_block_start", "index": self._num_blocks, "content_block": block})

    def _close(self) -> bytes:
        if not self._block:
            return b""
        at, closed = self._num_blocks, b""
        if self._block == "thinking":
            delta = {"type": "signature_delta", "signature": self._signature(at)}
            closed = _event({"type": "content_block_delta", "index": at, "delta": delta})
        self._block = ""
        self._num_blocks += 1
        return closed + _event({"type": "content_block_stop", "index": at})

    def _signature(self, at: int) -> str:
        """Return the signature of a thinking block: clients send it back, and leave out blocks without a signature."""
        return hashlib.sha256(f"{self._head['id']} {at}".encode()).hexdigest()


def _tool_use(call: CallDelta) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.call_id, "name": call.name}


def _input(arguments: str) -> orjson.Fragment:
    """Return the arguments as an object, even if they are incomplete; {} if the model wrote anything but an object."""
    try:
        value = from_json(arguments, allow_inf_nan=False, allow_partial=True)
        text = json.dumps(value if isinstance(value, dict) else {}, allow_nan=False)  # orjson refuses large integers
    except ValueError:
        text = "{}"
    return orjson.Fragment(text)


def _stop_of(finish_reason: str | None, stop_reason: str | int | None, *, has_calls: bool) -> dict[str, Any]:
    if finish_reason == "length":
        return _stop("max_tokens", None)
    if has_calls:
        return _stop("tool_use", None)
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return _stop("stop_sequence", stop_reason)
    return _stop("end_turn", None)


def _stop(reason: str | None, sequence: str | None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the counts; the prompt's tokens are split into cached ones, ones added to the cache, and the rest."""
    details = usage["prompt_tokens_details"] or {}
    cached, created = details.get("cached_tokens", 0), details.get("created_cache_tokens", 0)
    counts = _token_counts(usage["prompt_tokens"] - cached - created, cached, usage["completion_tokens"], created)
    if thoughts := usage.get("completion_tokens_details"):
        counts["output_tokens_details"] = {"thinking_tokens": thoughts["reasoning_tokens"]}
    return counts


def _token_counts(num_input: int, num_cached: int, num_output: int, num_created: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": num_input, "cache_creation_input_tokens": num_created, "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }  # fmt: skip
