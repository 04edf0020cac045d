"""One sequence as sent to the client: its text so far, its log probability and its finish reason."""

from scheduler.text.detokenizer import detokenizer_of
from scheduler.text.pieces import TextOptions, TextPiece
from scheduler.text.stops import StopFinder
from scheduler.tokens import Tokens
from wire.types import FinishReason, TokenOutput

_CONTEXT_TOKENS = 4
REPEATED = "repetition_detected"
"""The stop_reason of a repetition, as in vLLM."""


class Choice:
    """Mutable, owned by the stream. `index` is the one in its pieces, `echo` the text before its first piece."""

    def __init__(
        self, index: int, prompt: tuple[int, ...], tokens: Tokens, options: TextOptions, *, echo: str = ""
    ) -> None:
        self.finished = False
        self.finish_reason: str | None = None
        self.num_tokens = 0
        self.last_token_s: float | None = None
        self.cumulative_logprob: float | None = 0.0
        self._index = index
        self._options = options
        self._unsent = echo
        self._new: list[TokenOutput] = []
        self._detokenizer = detokenizer_of(
            tokens,
            skip_special_tokens=options.skip_special_tokens,
            spaces_between_special_tokens=options.spaces_between_special_tokens,
            context=prompt[-_CONTEXT_TOKENS:] if options.continues_prompt else (),
            kept=options.kept_special_ids,
        )
        self._finder = StopFinder(options.stops, include=options.include_stop) if options.stops else None

    def push(self, token: TokenOutput) -> TextPiece | None:
        """Return the new text of the token, None if nothing can be shown yet."""
        reason: str | None = None
        stop: str | int | None = None
        if self._options.prompt_only:
            text, reason = "", "length"
        else:
            text = self._decode(token)
            if self._finder is not None and token.index >= self._options.min_tokens:
                text, stop = self._finder.push(text)
            if stop is not None:
                reason = "stop"
            elif token.finish is not None:
                text += "" if self._finder is None else self._finder.flush()
                reason, stop = token.finish.value, self._stop_reason(token)
        if not text and reason is None:
            return None
        self.finished, self.finish_reason = reason is not None, reason
        text, self._unsent = self._unsent + text, ""
        tokens, self._new = tuple(self._new), []
        return TextPiece(self._index, text, reason, stop, tokens, self.cumulative_logprob)

    def _decode(self, token: TokenOutput) -> str:
        """Count the token and return the text that it completes."""
        text = ""
        if token.token_id is not None:
            self.num_tokens += 1
            self._new.append(token)
            if token.logprobs is None or self.cumulative_logprob is None:
                self.cumulative_logprob = None
            else:
                self.cumulative_logprob += token.logprobs.logprob
            if token.stop_token_id is None or self._options.include_stop:
                text = self._detokenizer.push(token.token_id)
        return text + self._detokenizer.flush() if token.finish is not None else text

    def _stop_reason(self, token: TokenOutput) -> int | str | None:
        if token.finish is FinishReason.REPETITION:
            return REPEATED
        return None if token.stop_token_id in self._options.silent_stop_ids else token.stop_token_id
