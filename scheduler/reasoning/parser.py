"""Separates the thinking in one choice's text, which arrives in pieces, from the content after it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.reasoning.formats import ReasoningFormat, ReasoningState


@dataclass(slots=True)
class SplitText:
    """New text of the thinking and new content."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Finds the markers of a format. Its joined output does not depend on how the text is cut; it never raises.

    Text that may become a marker is held back until it is clear, at the latest until `flush`. With `has_calls` a tool
    call ends the thinking, and after it no marker counts. With `keeps_all` nothing is left out: neither markers nor
    white space. Mutable, for one choice.
    """

    def __init__(
        self, text_format: ReasoningFormat, begin: ReasoningState, *, has_calls: bool = False, keeps_all: bool = False
    ) -> None:
        self._format = text_format
        self._keeps_all = keeps_all
        self._calls = text_format.calls if has_calls else ()
        self._thinking_markers = (*text_format.starts, *text_format.ends, *self._calls)
        self._content_markers = (*text_format.in_content, *self._calls) if text_format.in_content else ()
        self._state = begin
        self.num_markers = 0  # found while thinking
        self._held = ""
        self._blanks: list[str] = []  # at the end of the thinking so far

    @property
    def is_thinking(self) -> bool:
        """Whether the next text belongs to the thinking."""
        return self._state is ReasoningState.THINKING

    def push(self, text: str) -> SplitText:
        """Return what is new after `text`."""
        split = SplitText()
        text, self._held = self._held + text, ""
        while text:
            read = self._read_start if self._state is ReasoningState.UNDECIDED else self._read
            text = read(text, split)
        return split

    def flush(self) -> SplitText:
        """Return what was held back, at the end of the text."""
        split, held, self._held = SplitText(), self._held, ""
        self._add(held, split)
        return split

    def _read_start(self, text: str, split: SplitText) -> str:
        """Read the marker that an answer with thinking begins with; return the text after it."""
        starts = self._format.starts
        found = next((start for start in starts if text.startswith(start)), None)
        if found is None and any(start.startswith(text) for start in starts):
            self._held = text
            return ""
        self._state = ReasoningState.CONTENT if found is None else ReasoningState.THINKING
        marker = found or ""
        split.reasoning += marker if self._keeps_all else ""
        return text[len(marker) :]

    def _read(self, text: str, split: SplitText) -> str:
        """Add the text up to a marker; return the text after it."""
        markers = self._thinking_markers if self.is_thinking else self._content_markers
        if not markers:
            self._add(text, split)
            return ""
        at, marker = _find(text, markers)
        if marker is None:
            sure = len(text) - _held_length(text, markers)
            self._held = text[sure:]
            self._add(text[:sure], split)
            return ""
        self._add(text[:at], split)
        self.num_markers += self.is_thinking
        if marker not in self._calls:
            was_thinking = self.is_thinking
            self._state = ReasoningState.THINKING if marker in self._format.starts else ReasoningState.CONTENT
            if self._keeps_all and (was_thinking or self.is_thinking):
                split.reasoning += marker
            elif self._keeps_all:
                split.content += marker
            return text[at + len(marker) :]
        self._state, self._content_markers = ReasoningState.CONTENT, ()
        return text[at:]

    def _add(self, text: str, split: SplitText) -> None:
        if not self.is_thinking:
            split.content += text
            return
        if self._format.strips and not self._keeps_all:
            kept = text.rstrip()
            blank = text[len(kept) :]
            if not kept:
                self._blanks.append(blank)
                return
            text, self._blanks = "".join((*self._blanks, kept)), [blank]
        split.reasoning += text


def _find(text: str, markers: Sequence[str]) -> tuple[int, str | None]:
    """Return the first marker in `text` and where it is."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=(-1, None), key=lambda one: one[0])


def _held_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins a marker."""
    end = text[1 - max(map(len, markers)) :]
    if not any(marker[0] in end for marker in markers):
        return 0
    for size in range(len(end), 0, -1):
        if any(len(marker) > size and marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0
