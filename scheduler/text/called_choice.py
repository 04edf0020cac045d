"""One sequence of a request with tools: its text is parsed for calls before the client sees it."""

import dataclasses

from scheduler.text.choice import Choice
from scheduler.text.pieces import TextOptions, TextPiece
from scheduler.text.stops import StopFinder
from scheduler.tokens import Tokens
from scheduler.tools.call_options import CallOptions
from scheduler.tools.deltas import CallDelta, ParsedText
from wire.types import TokenOutput


def choice_of(
    index: int, prompt: tuple[int, ...], tokens: Tokens, options: TextOptions, *, echo: str = ""
) -> "Choice | CalledChoice":
    """Return a choice, with a parser of calls only if the request has one."""
    if options.calls is None:
        return Choice(index, prompt, tokens, options, echo=echo)
    kept = tokens.special_among(options.calls.markers)
    plain = Choice(index, prompt, tokens, dataclasses.replace(options, stops=(), kept_special_ids=kept))
    return CalledChoice(plain, index, options, options.calls, echo=echo)


class CalledChoice:
    """Takes the pieces of `choice`, which looks for no stop strings, and passes on content and calls.

    Stop strings are found in content and in skipped text; calls may contain them. Mutable, owned by the stream, like
    Choice.
    """

    def __init__(self, choice: Choice, index: int, options: TextOptions, calls: CallOptions, *, echo: str = "") -> None:
        self.finished = False
        self.finish_reason: str | None = None
        self.last_token_s: float | None = None
        self._choice = choice
        self._index = index
        self._calls = calls
        self._parser = calls.make_parser()
        self._min_tokens = options.min_tokens
        self._finder = StopFinder(options.stops, include=options.include_stop)
        self._skipped_finder = StopFinder(options.stops)
        self._num_calls_before = 0  # the text in which it searches
        self._unsent = echo
        self._tokens: list[TokenOutput] = []
        self._has_calls = False

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._choice.num_tokens

    def push(self, token: TokenOutput) -> TextPiece | None:
        """Return the new content and calls of the token, None if nothing can be shown yet."""
        piece = self._choice.push(token)
        if piece is None:
            return None
        self._tokens += piece.tokens
        parsed, reason = self._parse(piece), piece.finish_reason
        content, stop, num_calls = parsed.content, None, 0
        if token.index >= self._min_tokens:
            content, stop = self._finder.push(content)
            if stop is None:
                stop, num_calls = self._stop_in_skipped(parsed)
        if stop is not None:
            parsed.calls = [delta for delta in parsed.calls if delta.index < num_calls]
            reason = "stop"
        if reason is not None or parsed.calls:
            content += self._finder.flush()
        if not content and not parsed.calls and reason is None:
            return None
        self.finished, self.finish_reason = reason is not None, reason
        made = TextPiece(
            self._index, self._unsent + content, reason, piece.stop_reason if stop is None else stop,
            tuple(self._tokens), piece.cumulative_logprob, tuple(self._identified(delta) for delta in parsed.calls),
        )  # fmt: skip
        if reason == "stop" and self._has_calls:
            made.finish_reason = self._calls.finish_reason or reason
        self._unsent, self._tokens = "", []
        return made

    def _parse(self, piece: TextPiece) -> ParsedText:
        parsed = self._parser.push(piece.text)
        if piece.finish_reason is not None:
            last = self._parser.flush()
            if not (self._calls.forced and piece.finish_reason == "length"):  # a truncated call is not content
                parsed.content += last.content
            parsed.calls += last.calls
        if self._calls.only_first:
            parsed.calls = [delta for delta in parsed.calls if delta.index == 0]
        return parsed

    def _stop_in_skipped(self, parsed: ParsedText) -> tuple[str | None, int]:
        """Return the stop string in skipped text, None if there is none, and the number of calls before it."""
        for num_calls, text in parsed.skipped:
            if num_calls != self._num_calls_before:
                self._skipped_finder.flush()
                self._num_calls_before = num_calls
            if (stop := self._skipped_finder.push(text)[1]) is not None:
                return stop, num_calls
        return None, 0

    def _identified(self, delta: CallDelta) -> CallDelta:
        self._has_calls = True
        if delta.name is not None and delta.call_id is None:
            delta.call_id = self._calls.call_id(self._index, delta.index)
        return delta
