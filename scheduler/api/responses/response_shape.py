"""Answers of OpenAI's Responses API: a response with output items, and the events of its stream.

created, in_progress, (output_item.added, [content_part.added], delta…, done, [content_part.done], output_item.done)…,
and last completed, incomplete or failed
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from scheduler.api.answer_shape import CompleteChoice, PromptReport, Usage
from scheduler.api.logprobs import TokenFormatter, scored_output
from scheduler.api.responses.output_items import COMPLETED, IN_PROGRESS, INCOMPLETE, OutputItem, items_of, new_item
from scheduler.api.sse import SSE, StreamFormat
from scheduler.text.pieces import TextPiece
from scheduler.tools.deltas import CallDelta

RawMessages = Callable[[Sequence[int]], dict[str, Any]]
_OPENING = ("created", "in_progress")
_STREAMED = {"text": "output_text", "thinking": "reasoning_text", "tool_use": "function_call_arguments"}
_DELTA = 'event: {0}\ndata: {{"type":"{0}","item_id":"{1}","output_index":{2},{3}"sequence_number":'
_CODES = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}


class ResponseShape:
    """Builds one response, whole or as events. Mutable while it streams. Implements AnswerShape.

    `head` is the response before its first item, `final` the one at its end, empty until then. `origin` identifies the
    request in the ids of its items. `formatter` formats log probabilities and `raw` the prompt and the output's tokens,
    None if they are not requested.
    """

    def __init__(
        self, head: Mapping[str, Any], origin: bytes, formatter: TokenFormatter | None, raw: RawMessages | None = None
    ) -> None:  # fmt: skip
        self.head = head
        self._origin = origin
        self._formatter = formatter
        self._raw = raw
        self._token_ids: list[int] = []
        # The opening events have the first numbers and are sent first; a piece may be formatted before them.
        self._num_events = len(_OPENING)
        self._is_open = False
        self._output: list[dict[str, Any]] = []  # complete items
        self._item: OutputItem | None = None
        self._before = b""  # the bytes of a delta of this item, up to its sequence number
        self._num_messages = 0
        self._in_message = False
        self._status = COMPLETED
        self.final: dict[str, Any] = {}

    @property
    def stream_format(self) -> StreamFormat:
        """Server-sent events; made anew each time, because a stored one would be a reference cycle."""
        return StreamFormat(SSE.headers, self._frame, comment=SSE.comment)

    def opening(self, index: int, prompt: PromptReport, usage: Usage | None) -> bytes:
        """Return the events before the first item."""
        self._is_open = True
        return b"".join(_framed(name, at, {"response": self.head}) for at, name in enumerate(_OPENING))

    def event(self, piece: TextPiece, prompt: PromptReport, usage: Usage | None) -> bytes:
        """Return the events that carry `piece`."""
        scored = None if self._formatter is None else self._message_logprobs(piece)
        if self._raw is not None:
            self._token_ids += [token_id for token_id, _ in scored_output(piece.tokens)]
        events = self._delta("thinking", piece.reasoning) if piece.reasoning else b""
        if piece.text or scored:
            events += self._delta("text", piece.text, scored)
        for call in piece.calls:
            events += self._call(call)
        if piece.finish_reason is None:
            return events
        if self._item is None and not self._output:
            events += self._open("text")
        self._status = _status_of(piece.finish_reason)
        return events + self._close(self._status)

    def logprobs(self, piece: TextPiece, prompt: PromptReport) -> dict[str, list[Any]] | None:
        """Return the log probabilities of a message's tokens, by its number from 0; None if not requested."""
        if self._formatter is None:
            return None
        found = self._message_logprobs(piece)
        return {str(self._num_messages - 1): found} if found else {}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Return the last event."""
        response = self._finished(self._status, self._output, usage)
        return {"type": f"response.{self._status}", "sequence_number": self._num_events, "response": response}

    def whole(self, choices: list[CompleteChoice], prompts: Sequence[PromptReport], usage: Usage) -> dict[str, Any]:
        """Return the complete response."""
        (choice,) = choices
        *before, last = items_of(choice, self._origin)
        status, self._token_ids = _status_of(choice.finish_reason), [*choice.token_ids]
        return self._finished(status, [*(item.shown(COMPLETED) for item in before), last.shown(status)], usage)

    def cancel(self) -> None:
        """Set `final` to the response with the items so far, cancelled."""
        self._finished("cancelled", self._output_so_far(), None)

    def _finished(
        self, status: str, output: Sequence[Any], usage: Usage | None, error: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:  # fmt: skip
        """Return the response at its end: every response, whole or streamed, complete or failed, is built here."""
        self.final = {
            **self.head,
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "error": error,
            "output": output,
            "usage": None if usage is None else _usage(usage),
            **({} if self._raw is None else self._raw(self._token_ids)),
        }
        return self.final

    def _message_logprobs(self, piece: TextPiece) -> list[Any]:
        """Return the log probabilities of a piece's tokens in a message; those of thinking and calls are left out."""
        assert self._formatter is not None
        if piece.reasoning:
            self._in_message = False
        if piece.text and not self._in_message:
            self._in_message = True
            self._num_messages += 1
        found: list[Any] = self._formatter.chat(scored_output(piece.tokens))["content"] if self._in_message else []
        if piece.calls:
            self._in_message = False
        return found

    def _delta(self, kind: str, text: str, scored: Sequence[Any] | None = None) -> bytes:
        item, opened = self._item, b""
        if item is None or item.kind != kind:
            opened = self._open(kind)
            item = self._item
        assert item is not None
        item.texts.append(text)
        number, self._num_events = self._num_events, self._num_events + 1
        if kind != "text":
            return b'%b%b%d,"delta":%b}\n\n' % (opened, self._before, number, orjson.dumps(text))
        item.logprobs += scored or ()
        logprobs = orjson.dumps(scored or [])
        return b'%b%b%d,"logprobs":%b,"delta":%b}\n\n' % (opened, self._before, number, logprobs, orjson.dumps(text))

    def _call(self, call: CallDelta) -> bytes:
        opened = b"" if call.name is None else self._open("tool_use", call)
        return opened + self._delta("tool_use", call.arguments) if call.arguments else opened

    def _open(self, kind: str, call: CallDelta | None = None) -> bytes:
        """Return the events that close the open item and open one of this kind."""
        closed, at = self._close(COMPLETED), len(self._output)
        item = self._item = new_item(self._origin, at, kind, call)
        added = self._event("output_item.added", {"output_index": at, "item": item.shown(IN_PROGRESS)})
        name, has_part = f"response.{_STREAMED[kind]}.delta", call is None
        place = '"content_index":0,' if has_part else ""
        self._before = _DELTA.format(name, item.item_id, at, place).encode()
        if has_part:
            added += self._event("content_part.added", self._place(item) | {"part": item.part()})
        return closed + added

    def _close(self, status: str) -> bytes:
        item = self._item
        if item is None:
            return b""
        place = self._place(item)
        self._item = None
        self._output.append(item.shown(status))
        done = f"{_STREAMED[item.kind]}.done"
        if item.call is not None:
            events = self._event(done, place | {"name": item.call.name, "arguments": item.text})
        else:
            scored = {"logprobs": item.logprobs} if item.kind == "text" else {}
            events = self._event(done, place | {"text": item.text} | scored)
            events += self._event("content_part.done", place | {"part": item.part()})
        at, shown = place["output_index"], self._output[-1]
        return events + self._event("output_item.done", {"output_index": at, "item": shown})

    def _place(self, item: OutputItem) -> dict[str, Any]:
        at = len(self._output)
        return {"item_id": item.item_id, "output_index": at} | ({"content_index": 0} if item.call is None else {})

    def _event(self, name: str, fields: Mapping[str, Any]) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return _framed(name, number, fields)

    def _frame(self, body: Mapping[str, Any]) -> bytes:
        """Return the last event; an error becomes a failed response, with the items so far."""
        if "error" not in body:
            return _as_event(body)
        opening = b"" if self._is_open else self.opening(0, PromptReport((), ()), None)
        error, kind = body["error"], body["error"]["type"]
        shown = {"code": _CODES.get(kind, "server_error"), "message": error["message"]}
        failed = self._finished("failed", self._output_so_far(), None, shown)
        return opening + self._event("failed", {"response": failed})

    def _output_so_far(self) -> list[dict[str, Any]]:
        return self._output + ([] if self._item is None else [self._item.shown(INCOMPLETE)])


def _framed(name: str, number: int, fields: Mapping[str, Any]) -> bytes:
    return _as_event({"type": f"response.{name}", "sequence_number": number, **fields})


def _as_event(body: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), orjson.dumps(body))


def _status_of(finish_reason: str | None) -> str:
    return INCOMPLETE if finish_reason == "length" else COMPLETED


def _usage(usage: Usage) -> dict[str, Any]:
    details = usage["prompt_tokens_details"] or {}
    cached, created = details.get("cached_tokens", 0), details.get("created_cache_tokens", 0)
    thoughts = usage.get("completion_tokens_details") or {"reasoning_tokens": 0}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": created},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": thoughts,
        "total_tokens": usage["total_tokens"],
    }
