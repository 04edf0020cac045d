"""Find stop strings in text that comes in pieces; never let out a piece that may become one."""

from collections.abc import Sequence


class StopFinder:
    """Holds back the longest end of the text so far that begins a stop string.

    The stop that ends first wins, so the answer does not depend on how the text was cut; of two that end together
    the longer one does.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text to let out, and the stop string if it ended the text."""
        if not self._stops or not text:
            return text, None
        text = self._held + text
        ends = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, _, stop = min(ends)
            self._held = ""
            return text[: end if self._include else end - len(stop)], stop
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Return what is held: no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`, shorter than `stop`."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
