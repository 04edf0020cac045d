"""One sequence whose text is parsed before the client sees it: for its thinking, then for tool calls."""

import dataclasses

from scheduler.reasoning.parser import SplitText
from scheduler.text.choice import Choice
from scheduler.text.pieces import TextOptions, TextPiece
from scheduler.text.stops import StopFinder
from scheduler.tokens import Tokens
from scheduler.tools.deltas import CallDelta, ParsedText
from wire.types import TokenOutput


def choice_of(
    index: int, prompt: tuple[int, ...], tokens: Tokens, options: TextOptions, *, echo: str = ""
) -> "Choice | ParsedChoice":
    """Return a choice, with parsers only if the request has some."""
    if options.calls is None and options.reasoning is None:
        return Choice(index, prompt, tokens, options, echo=echo)
    markers = () if options.calls is None else options.calls.markers
    if options.reasoning is not None:
        markers += options.reasoning.text_format.markers
    kept = tokens.special_among(markers)
    plain = Choice(index, prompt, tokens, dataclasses.replace(options, stops=(), kept_special_ids=kept))
    return ParsedChoice(plain, index, options, echo=echo)


class ParsedChoice:
    """Takes the pieces of `choice`, which looks for no stop strings, and passes on thinking, content and calls.

    What follows the thinking is parsed for calls. Stop strings are found in content and in skipped text; thinking and
    calls may contain them. Mutable, owned by the stream, like Choice.
    """

    def __init__(self, choice: Choice, index: int, options: TextOptions, *, echo: str = "") -> None:
        self.finished = False
        self.finish_reason: str | None = None
        self.last_token_s: float | None = None
        self.num_reasoning_tokens = 0
        self._choice = choice
        self._index = index
        self._reasoning = None if options.reasoning is None else options.reasoning.make_parser()
        self._hides_reasoning = options.reasoning is not None and not options.reasoning.include
        self._joins_reasoning = options.reasoning is not None and not options.reasoning.separate
        self._calls = options.calls
        self._parser = None if options.calls is None else options.calls.make_parser()
        self._min_tokens = options.min_tokens
        self._finder = StopFinder(options.stops, include=options.include_stop)
        self._skipped_finder = StopFinder(options.stops)
        self._num_calls_before = 0  # the number of calls before the text in which `_finder` searches
        self._unsent = echo
        self._tokens: list[TokenOutput] = []
        self._num_shown = 0  # tokens up to the last content, kept when thinking is hidden
        self._has_calls = False

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._choice.num_tokens

    def push(self, token: TokenOutput) -> TextPiece | None:
        """Return the new thinking, content and calls of the token, None if nothing can be shown yet."""
        piece = self._choice.push(token)
        if piece is None:
            return None
        self._tokens += piece.tokens
        split, before = self._split(piece), ""
        if self._joins_reasoning and split.reasoning:
            before, split.reasoning = self._finder.flush() + split.reasoning, ""
        parsed, reason = self._parse(split.content, piece.finish_reason), piece.finish_reason
        content, stop, num_calls = self._until_stop(parsed, searches=token.index >= self._min_tokens)
        content = before + content
        if stop is not None:
            parsed.calls = [delta for delta in parsed.calls if delta.index < num_calls]
            reason = "stop"
        if reason is not None or (parsed.calls and parsed.calls[-1].index >= self._num_calls_before):
            content += self._finder.flush()
        if not (content or split.reasoning or parsed.calls) and reason is None:
            return None
        self.finished, self.finish_reason = reason is not None, reason
        made = TextPiece(
            self._index, self._unsent + content, reason, piece.stop_reason if stop is None else stop,
            tuple(self._tokens), piece.cumulative_logprob, tuple(self._identified(delta) for delta in parsed.calls),
            split.reasoning,
        )  # fmt: skip
        if reason == "stop" and self._has_calls and self._calls is not None:
            made.finish_reason = self._calls.finish_reason or reason
        self._unsent, self._tokens, self._num_shown = "", [], 0
        return made

    def _split(self, piece: TextPiece) -> SplitText:
        """Separate the thinking, and count its tokens, without markers."""
        parser = self._reasoning
        if parser is None:
            return SplitText(content=piece.text)
        was_thinking, num_markers, split = parser.is_thinking, parser.num_markers, parser.push(piece.text)
        if piece.finish_reason is not None:
            last = parser.flush()
            split = SplitText(split.reasoning + last.reasoning, split.content + last.content)
        if was_thinking:
            self.num_reasoning_tokens += max(0, len(piece.tokens) - parser.num_markers + num_markers)
        if self._hides_reasoning:
            split.reasoning = ""
            if was_thinking or parser.is_thinking:
                del self._tokens[self._num_shown :]
            if split.content:
                self._num_shown = len(self._tokens)
        return split

    def _parse(self, text: str, finish_reason: str | None) -> ParsedText:
        if self._parser is None or self._calls is None:
            return ParsedText(texts=[(0, text, True)])
        parsed = self._parser.push(text)
        if finish_reason is not None:
            last = self._parser.flush()
            if self._calls.forced and finish_reason == "length":  # a truncated call is not content
                last.texts.clear()
            parsed.extend(last)
        if (max_calls := self._calls.max_calls) is not None:
            parsed.calls = [delta for delta in parsed.calls if delta.index < max_calls]
        if max_calls == 0:
            parsed.texts = [(0, text, True) for _, text, _ in parsed.texts]
        return parsed

    def _until_stop(self, parsed: ParsedText, *, searches: bool) -> tuple[str, str | None, int]:
        """Return the content up to a stop string, the stop string, if any, and the number of calls before it."""
        content = ""
        for num_calls, text, is_content in parsed.texts:
            if num_calls != self._num_calls_before:
                content += self._finder.flush()
                self._skipped_finder.flush()
                self._num_calls_before = num_calls
            if searches:
                text, stop = (self._finder if is_content else self._skipped_finder).push(text)
            content += text if is_content else ""
            if searches and stop is not None:
                return content, stop, num_calls
        return content, None, 0

    def _identified(self, delta: CallDelta) -> CallDelta:
        self._has_calls = True
        if delta.name is not None and delta.call_id is None and self._calls is not None:
            delta.call_id = self._calls.call_id(self._index, delta.index)
        return delta
