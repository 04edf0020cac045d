"""The JSON of a completion, its chunks and its errors, field by field as vLLM writes them."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from testing.vllm_worker.request import FakeBody
from wire.types import TokenLogprobs


@dataclass(slots=True)
class FakeChoice:
    """What one sequence has generated, or a piece of it."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt: tuple[int, ...] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(slots=True)
class AnswerBody:
    """Makes the JSON of one request's answer."""

    request_id: str
    model: str
    body: FakeBody
    created: int = field(default_factory=lambda: int(time.time()))

    def chunk(self, choice: FakeChoice) -> bytes:
        """Return an SSE event with a piece of a sequence. Fields that vLLM does not set are left out."""
        values: dict[str, Any] = {"index": choice.index, "text": text_of(choice), "logprobs": self._logprobs(choice)}
        values |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        first = self.body.return_token_ids and choice.prompt is not None
        values["prompt_token_ids"] = choice.prompt if first else None
        values["token_ids"] = choice.token_ids if self.body.return_token_ids else None
        return event(self._head() | {"choices": [values]})

    def last_chunk(self, usage: Mapping[str, Any]) -> bytes:
        """Return the event with the usage."""
        return event(self._head() | {"choices": [], "usage": usage})

    def whole(self, choices: Sequence[FakeChoice], usage: Mapping[str, Any], transfer: Any) -> dict[str, Any]:
        """Return the answer of a request that does not stream."""
        rows = [
            {
                "index": one.index,
                "text": text_of(one),
                "logprobs": self._logprobs(one),
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
                "token_ids": one.token_ids if self.body.return_token_ids else None,
                "prompt_logprobs": scores_of(one),
                "prompt_token_ids": one.prompt if self.body.return_token_ids else None,
                "routed_experts": None,
            }
            for one in choices
        ]
        empty = dict.fromkeys(("service_tier", "system_fingerprint", "ec_transfer_params", "metrics"))
        return self._head() | {"choices": rows, "usage": usage, "kv_transfer_params": transfer} | empty

    def usage(self, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """Return the usage as a worker with --enable-prompt-tokens-details reports it."""
        prompt_tokens = sum(map(len, self.body.prompts))
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def _head(self) -> dict[str, Any]:
        return {"id": self.request_id, "object": "text_completion", "created": self.created, "model": self.model}

    def _logprobs(self, choice: FakeChoice) -> dict[str, Any] | None:
        if self.body.params.logprobs is None:
            return None
        rows = list(zip(choice.token_ids, choice.logprobs, strict=True))
        return {
            "text_offset": [0] * len(rows),
            "token_logprobs": [scores.logprob for _, scores in rows],
            "tokens": [f"token_id:{token_id}" for token_id, _ in rows],
            "top_logprobs": [_top(token_id, scores) for token_id, scores in rows],
        }


def event(values: Mapping[str, Any]) -> bytes:
    """Return one event of a stream."""
    return f"data: {json.dumps(values, separators=(',', ':'))}\n\n".encode()


def error_body(message: str, kind: str, status: int, param: str | None = None) -> dict[str, Any]:
    """Return vLLM's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def text_of(choice: FakeChoice) -> str:
    """Return the text of a piece of a sequence."""
    stop = choice.finish_reason == "stop"
    shown = choice.token_ids[:-1] if stop else choice.token_ids  # a stop token has no text
    return "".join(f" {token_id}" for token_id in shown)


def _top(token_id: int, scores: TokenLogprobs) -> dict[str, float]:
    best = zip(scores.top_ids, scores.top_logprobs, strict=True)
    return {f"token_id:{token_id}": scores.logprob} | {f"token_id:{one}": value for one, value in best}


def scores_of(choice: FakeChoice) -> list[dict[str, Any] | None] | None:
    """Return the log probabilities of the prompt's tokens."""
    if choice.prompt_logprobs is None or choice.prompt is None:
        return None
    return [
        None if one is None else _ranked(token_id, one)
        for token_id, one in zip(choice.prompt, choice.prompt_logprobs, strict=True)
    ]


def _ranked(token_id: int, scores: TokenLogprobs) -> dict[str, Any]:
    best = zip(scores.top_ids, scores.top_logprobs, strict=True)
    rows = {
        str(one): {"logprob": value, "rank": rank, "decoded_token": f" {one}"}
        for rank, (one, value) in enumerate(best, 1)
    }
    return {str(token_id): {"logprob": scores.logprob, "rank": scores.rank, "decoded_token": f" {token_id}"}} | rows
