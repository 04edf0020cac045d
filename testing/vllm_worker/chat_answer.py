"""The JSON of a chat's answer and its chunks, as vLLM writes them where it returns token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from testing.vllm_worker.answer_body import AnswerBody, FakeChoice, event, scores_of, text_of
from wire.types import TokenLogprobs


@dataclass(slots=True)
class ChatAnswer:
    """Makes the JSON of one chat's answer; `form` makes that of a completion with the same ids."""

    form: AnswerBody

    def chunk(self, choice: FakeChoice) -> bytes:
        """Return the SSE event with a piece of a sequence, after the role's if it is the first."""
        first = self._opening(choice) if choice.prompt is not None else b""
        values: dict[str, Any] = {"index": choice.index, "delta": {"content": text_of(choice)}}
        values |= {"logprobs": self._logprobs(choice), "finish_reason": choice.finish_reason}
        values |= {} if choice.finish_reason is None else {"stop_reason": choice.stop_reason}
        values |= {"token_ids": choice.token_ids if self.form.body.return_token_ids else None}
        return first + event(self._head("chat.completion.chunk") | {"choices": [values]})

    def last_chunk(self, usage: Mapping[str, Any]) -> bytes:
        """Return the event with the usage."""
        return event(self._head("chat.completion.chunk") | {"choices": [], "usage": usage})

    def whole(self, choices: Sequence[FakeChoice], usage: Mapping[str, Any], transfer: Any) -> dict[str, Any]:
        """Return the answer of a request that does not stream."""
        rows = [
            {
                "index": one.index,
                "message": {"role": "assistant", "content": text_of(one), "tool_calls": []},
                "logprobs": self._logprobs(one),
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
                "token_ids": one.token_ids if self.form.body.return_token_ids else None,
            }
            for one in choices
        ]
        first = choices[0]
        own = {
            "prompt_logprobs": scores_of(first),
            "prompt_token_ids": first.prompt if self.form.body.return_token_ids else None,
        }
        return self._head("chat.completion") | {"choices": rows, "usage": usage, "kv_transfer_params": transfer} | own

    def usage(self, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """Return the usage."""
        return self.form.usage(completion_tokens, cached_tokens)

    def _opening(self, choice: FakeChoice) -> bytes:
        role = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        ids = choice.prompt if self.form.body.return_token_ids else None
        return event(self._head("chat.completion.chunk") | {"choices": [role], "prompt_token_ids": ids})

    def _head(self, kind: str) -> dict[str, Any]:
        form = self.form
        return {"id": form.request_id, "object": kind, "created": form.created, "model": form.model}

    def _logprobs(self, choice: FakeChoice) -> dict[str, Any] | None:
        wanted = self.form.body.params.logprobs
        if wanted is None:
            return None
        rows = zip(choice.token_ids, choice.logprobs, strict=True)
        return {"content": [_entry(token_id, scores, wanted) for token_id, scores in rows]}


def _entry(token_id: int, scores: TokenLogprobs, wanted: int) -> dict[str, Any]:
    """Return a token's log probability, with at most `wanted` in `top_logprobs`, of which its own is the first."""
    values = {token_id: scores.logprob} | dict(zip(scores.top_ids, scores.top_logprobs, strict=True))
    top = [_named(one, value) for one, value in list(values.items())[:wanted]]
    return _named(token_id, scores.logprob) | {"top_logprobs": top}


def _named(token_id: int, logprob: float) -> dict[str, Any]:
    name = f"token_id:{token_id}"
    return {"token": name, "logprob": logprob, "bytes": list(name.encode())}
