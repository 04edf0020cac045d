"""Read one choice's text in steps that wait for more of it. Pure.

A format is a generator of steps, written as if it had the whole text:

    def steps(reader):
        while (yield from reader.content_until(BEGIN)):
            head = yield from reader.head(NAME, END)
            if head is None:
                reader.not_a_call(...)
            else:
                reader.begin_call(head.group(1))
                yield from reader.json_arguments()
                reader.end_call()

The reader's methods, and so the steps, return the same however the text is cut.
"""

import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeAlias, TypeVar

from scheduler.tools.deltas import ParsedText
from scheduler.tools.json_value import JsonValueEnd
from scheduler.tools.markers import Markers

_T = TypeVar("_T")
Steps: TypeAlias = Generator[None, None, _T]
"""Steps that yield where they need more text."""
MAX_HEAD_CHARS = 1024
"""The longest text that may come before a call's arguments if the call is sent as it arrives."""
MAX_KEY_CHARS = 64 * 1024
"""The longest key of an argument: all schemas of a request have fewer characters, so none has a longer key."""
BLANKS = " \t\r\n"


class CallReader:
    """The text that is not read yet, and what was found in the text read. Mutable, owned by its StepParser.

    `text` may be shorter than what is needed until `is_over`. `num_calls` counts the calls that are complete.
    `schemas` has the schema of each tool's arguments by the tool's name.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.schemas = schemas
        self.text = ""
        self.is_over = False
        self.num_calls = 0
        self.parsed = ParsedText()
        self._pending: list[str] = []  # content if other content follows, or if no call does
        self._has_content = False
        self._has_begun = False
        self._has_arguments = False

    @property
    def next_sign(self) -> str:
        """Return the next character, "" if there is none yet."""
        return self.text[:1]

    def content(self, text: str) -> None:
        """Add text outside of calls: white space alone before the first call is left out, text after one is skipped."""
        if not text:
            return
        if self.num_calls:
            self.parsed.texts.append((self.num_calls, text, False))
        elif text.isspace() and (self._pending or not self._has_content):
            self._pending.append(text)
        else:
            self.not_a_call(text)

    def pending(self, text: str) -> None:
        """Add text, such as the marker of a section, that is content only if no call follows it."""
        if not self.num_calls and text:
            self._pending.append(text)

    def not_a_call(self, text: str) -> None:
        """Add text that began like a call but is not one: it is content, even after calls."""
        self._has_content = True
        self.parsed.texts.append((self.num_calls, "".join([*self._pending, text]), True))
        self._pending.clear()

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin the next call; `call_id` is the model's own id for it."""
        self._pending.clear()
        self._has_begun, self._has_arguments = True, False
        self.parsed.begin_call(self.num_calls, name, call_id)

    def arguments(self, text: str) -> None:
        """Add arguments of the call."""
        if text:
            self._has_arguments = True
            self.parsed.add_arguments(self.num_calls, text)

    def end_call(self) -> None:
        """End the call; without arguments it has an empty object."""
        if not self._has_arguments:
            self.arguments("{}")
        self.num_calls += 1

    def cut_call(self) -> None:
        """End the call where it is: its arguments are invalid from here on."""
        self.num_calls += 1

    def finish(self) -> None:
        """Turn what is pending at the end of the text into content if there was no call."""
        if self._pending and not self._has_begun:
            self.not_a_call("")

    def not_a_call_until(self, markers: Markers) -> Steps[str]:
        """Read text that is not a call, up to a marker; return the marker, "" at the end of the text."""
        return self.until(markers, self.not_a_call)

    def left_as_content(self, text: str, markers: Markers, end: str, begin: Markers) -> Steps[str]:
        """Make content of `text`, which is not a call, and of what follows; return the next marker of `begin`.

        What follows ends at one of `markers`: `end`, which still becomes content, or one of `begin`.
        """
        self.not_a_call(text)
        marker = yield from self.not_a_call_until(markers)
        if marker == end:
            self.not_a_call(end)
            marker = yield from self.content_until(begin)
        return marker

    def content_until(self, markers: Markers) -> Steps[str]:
        """Read content up to a marker; return the marker, "" at the end of the text."""
        return self.until(markers, self.content)

    def taken_until(self, markers: Markers, limit: int | None = None) -> Steps[tuple[str, str]]:
        """Return the text up to a marker, and the marker: "" at the end of the text, or without one within `limit`."""
        taken: list[str] = []
        marker = yield from self.until(markers, taken.append, limit)
        return "".join(taken), marker

    def dropped_until(self, markers: Markers) -> Steps[str]:
        """Leave out the text up to a marker; return the marker, "" at the end of the text."""
        return self.until(markers, _ignore)

    def until(self, markers: Markers, sink: Callable[[str], None], limit: int | None = None) -> Steps[str]:
        """Pass the text before a marker to `sink` as it arrives; return the marker, "" at the end or beyond `limit`."""
        num_chars = 0
        while True:
            before, marker, rest = markers.split(self.text)
            if self.is_over and not marker:
                before, rest = self.text, ""
            if limit is not None and num_chars + len(before) > limit:
                at = limit - num_chars
                sink(before[:at])
                self.text = before[at:] + marker + rest
                return ""
            self.text = rest
            if before:
                sink(before)
                num_chars += len(before)
            if marker or self.is_over:
                return marker
            yield

    def follows(self, markers: Markers) -> Steps[bool]:
        """Return whether a marker comes next; the marker is not read."""
        while True:
            before, marker, _ = markers.split(self.text)
            if before or marker or self.is_over:
                return bool(marker) and not before
            yield

    def run_of(self, signs: str) -> Steps[str]:
        """Return the characters up to one that is not in `signs`."""
        taken: list[str] = []
        while True:
            rest = self.text.lstrip(signs)
            taken.append(self.text[: len(self.text) - len(rest)])
            self.text = rest
            if rest or self.is_over:
                return "".join(taken)
            yield

    def head(
        self, pattern: re.Pattern[str], marker: str | None = None, *, begins: re.Pattern[str] | None = None
    ) -> Steps[re.Match[str] | None]:
        """Read what is before arguments; None, and nothing is read, if `marker` or too much text comes first.

        `begins`, if given, matches all that a head may begin with, so that other text is not held back.
        """
        while True:
            found = pattern.match(self.text, 0, MAX_HEAD_CHARS)
            if found is not None:
                if marker is not None and marker in found.group():
                    return None
                self.text = self.text[found.end() :]
                return found
            if self.is_over or len(self.text) > MAX_HEAD_CHARS or (marker is not None and marker in self.text):
                return None
            if begins is not None and begins.fullmatch(self.text) is None:
                return None
            yield

    def waited(self, num_chars: int) -> Steps[None]:
        """Wait for this many characters, or the end of the text."""
        while len(self.text) < num_chars and not self.is_over:
            yield

    def json_arguments(self) -> Steps[bool]:
        """Pass a JSON value on as arguments; return whether it has ended."""
        return self.json_value(self.arguments, JsonValueEnd())

    def rest_of_object(self) -> Steps[bool]:
        """Skip the rest of a JSON object; return whether it has ended."""
        return self.json_value(_ignore, JsonValueEnd(depth=1))

    def rest_of_text(self) -> Steps[None]:
        """Skip the rest of the text."""
        while True:
            self.text = ""
            if self.is_over:
                return
            yield

    def json_value(self, sink: Callable[[str], None], end: JsonValueEnd) -> Steps[bool]:
        """Pass a JSON value to `sink` as it arrives; return whether it has ended."""
        while True:
            at = end.find(self.text) if self.text else None
            value, self.text = (self.text, "") if at is None else (self.text[:at], self.text[at:])
            if value:
                sink(value)
            if at is not None or self.is_over:
                return at is not None
            yield


class StepParser:
    """A ToolCallParser that runs the steps of a format; text after their last one is content."""

    def __init__(
        self, steps: Callable[[CallReader], Steps[None]], schemas: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self._reader = CallReader(schemas or {})
        self._steps = steps(self._reader)
        self._is_done = False

    def push(self, text: str) -> ParsedText:
        """Return what is new after `text`."""
        reader = self._reader
        reader.parsed = parsed = ParsedText()
        reader.text += text
        if not self._is_done:
            for _ in self._steps:
                return parsed
            self._is_done = True
        reader.content(reader.text)
        reader.text = ""
        return parsed

    def flush(self) -> ParsedText:
        """Return what was held back, at the end of the text."""
        self._reader.is_over = True
        parsed = self.push("")
        self._reader.finish()
        return parsed


def _ignore(text: str) -> None:
    """Discard text."""
