"""Answers of /inference/v1/generate: token ids, and with `output_mode` text their text; whole or in chunks."""

import time
from collections.abc import Sequence
from typing import Any

from scheduler.api.answer_options import AnswerOptions
from scheduler.api.answer_shape import CompleteChoice, PromptReport, Usage
from scheduler.api.logprobs import Scored, TokenFormatter, scored_output, scored_prompt
from scheduler.api.prompt_scores import matrix_of
from scheduler.api.sse import SSE, event
from scheduler.text.pieces import TextPiece

_CHOICE_NULLS = dict.fromkeys(("routed_experts", "sampling_mask", "weight_versions"))
_ANSWER_NULLS = dict.fromkeys(("mm_placeholders", "metrics", "kv_transfer_params", "ec_transfer_params"))


class TokensShape:
    """Builds the answer to one request. Implements AnswerShape."""

    stream_format = SSE

    def __init__(
        self, answer_id: str, model: str, formatter: TokenFormatter, options: AnswerOptions, *,
        has_text: bool, has_prompt: bool, scored: Sequence[Sequence[int]] | None,
    ) -> None:  # fmt: skip
        """`has_prompt`: the answer, or a stream's first chunk, has the prompt's ids. `scored`: the tokens to score."""
        self._head: dict[str, Any] = {"request_id": answer_id}
        self._mode = {"output_mode": "text" if has_text else "tokens"}
        self._model, self._created = model, int(time.time())
        self._formatter, self._options = formatter, options
        self._has_text, self._has_prompt, self._scored = has_text, has_prompt, scored
        self._sends_prompt = has_prompt

    def opening(self, index: int, prompt: PromptReport, usage: Usage | None) -> bytes:
        """Return b"": the stream has no opening event."""
        return b""

    def event(self, piece: TextPiece, prompt: PromptReport, usage: Usage | None) -> bytes:
        """Return the event of a chunk."""
        ids = tuple(token_id for token_id, _ in scored_output(piece.tokens))
        logprobs = self.logprobs(piece, prompt)
        one = CompleteChoice(piece.index, piece.text, piece.finish_reason, piece.stop_reason, logprobs, ids)
        prompt_ids = {"prompt_token_ids": list(prompt.token_ids)} if self._sends_prompt else {}
        self._sends_prompt = False
        return event(self._head | {"usage": usage} | prompt_ids | self._mode | {"choices": [self._choice_object(one)]})

    def logprobs(self, piece: TextPiece, prompt: PromptReport) -> dict[str, list[Any]] | None:
        """Return one entry for each token of `piece`: by id, or in the format of chats if the answer has text."""
        if self._options.logprobs is None:
            return None
        scored = scored_output(piece.tokens)
        entries = self._formatter.chat(scored)["content"] if self._has_text else self._entries_by_id(scored)
        return {"content": entries}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Return the last chunk."""
        return self._head | {"usage": usage} | self._mode | {"choices": []}

    def whole(self, choices: list[CompleteChoice], prompts: Sequence[PromptReport], usage: Usage) -> dict[str, Any]:
        """Return the complete answer."""
        (prompt,) = prompts
        scores = None
        if self._options.prompt_logprobs is not None:
            formatter = TokenFormatter(self._formatter.texts, self._options.prompt_logprobs)
            scores = formatter.prompt(scored_prompt(prompt.token_ids, prompt.logprobs))
        return (
            self._head
            | {"model": self._model, "created": self._created, "usage": usage, "prompt_logprobs": scores}
            | {"prompt_token_id_logprobs": None if self._scored is None else matrix_of(self._scored, prompt.logprobs)}
            | _ANSWER_NULLS
            | {"prompt_token_ids": list(prompt.token_ids) if self._has_prompt else None}
            | self._mode
            | {"choices": [self._choice_object(one) for one in choices]}
        )

    def _choice_object(self, one: CompleteChoice) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": one.index, "finish_reason": one.finish_reason, "stop_reason": one.stop_reason,
            "token_ids": one.token_ids, **_CHOICE_NULLS, "logprobs": one.logprobs,
        }  # fmt: skip
        return choice | {"text": one.text} if self._has_text else choice

    def _entries_by_id(self, scored: Sequence[Scored]) -> list[dict[str, Any]]:
        """Return for each token its entry with the most likely tokens, the token itself first."""
        found = []
        for (token_id, _), by_id in zip(scored, self._formatter.prompt(scored), strict=True):
            ranked = {
                int(name): {"token_id": int(name), "logprob": entry["logprob"], "rank": entry["rank"]}
                for name, entry in (by_id or {}).items()
            }
            own = ranked.pop(token_id, {"token_id": token_id, "logprob": -9999.0, "rank": None})
            found.append(own | {"top_logprobs": [own, *ranked.values()]})
        return found
