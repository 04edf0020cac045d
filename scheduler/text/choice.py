"""One sequence as sent to the client: its text so far, its log probability and its finish reason."""

from scheduler.request import NewToken
from scheduler.text.detokenizer import Detokenizer
from scheduler.text.pieces import TextOptions, TextPiece
from scheduler.text.stops import StopFinder
from scheduler.tokens import Tokens
from wire.types import FinishReason

_CONTEXT_TOKENS = 4
REPEATED = "repetition_detected"
"""The stop_reason of a repetition, as in vLLM."""


class Choice:
    """Mutable, owned by the stream. `index` is that of its pieces, `echo` the text before its first one."""

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
        self._new: list[NewToken] = []
        self._detokenizer = Detokenizer(
            tokens,
            skip_special_tokens=options.skip_special_tokens,
            spaces_between_special_tokens=options.spaces_between_special_tokens,
            context=prompt[-_CONTEXT_TOKENS:] if options.continues_prompt else (),
        )
        self._finder = StopFinder(options.stops, include=options.include_stop)

    def push(self, event: NewToken) -> TextPiece | None:
        """Return the new text of the event, None if nothing can be shown yet."""
        if self._options.prompt_only:
            return self._last("", "length", None)
        text = self._decode(event)
        stop: str | None = None
        if event.index >= self._options.min_tokens:
            text, stop = self._finder.push(text)
        if stop is not None:
            return self._last(text, "stop", stop)
        if event.finish is not None:
            return self._last(text + self._finder.flush(), event.finish.value, self._stop_reason(event))
        return self._piece(text) if text else None

    def _decode(self, event: NewToken) -> str:
        text = ""
        if event.token_id is not None:
            self._count(event)
            if event.stop_token_id is None or self._options.include_stop:
                text = self._detokenizer.push(event.token_id)
        return text + self._detokenizer.flush() if event.finish is not None else text

    def _count(self, event: NewToken) -> None:
        self.num_tokens += 1
        self._new.append(event)
        if event.logprobs is None or self.cumulative_logprob is None:
            self.cumulative_logprob = None
        else:
            self.cumulative_logprob += event.logprobs.logprob

    def _last(self, text: str, reason: str, stop: str | int | None) -> TextPiece:
        self.finished, self.finish_reason = True, reason
        return self._piece(text, reason, stop)

    def _piece(self, text: str, reason: str | None = None, stop: str | int | None = None) -> TextPiece:
        """Return a piece with everything not yet sent."""
        text, self._unsent = self._unsent + text, ""
        tokens, self._new = tuple(self._new), []
        return TextPiece(self._index, text, reason, stop, tokens, self.cumulative_logprob)

    def _stop_reason(self, event: NewToken) -> int | str | None:
        if event.finish is FinishReason.REPETITION:
            return REPEATED
        return None if event.stop_token_id in self._options.silent_stop_ids else event.stop_token_id
