"""Find stop strings in streamed text, and hold back text that may become one."""

from collections.abc import Sequence


class StopFinder:
    """Holds back the longest suffix of the text so far that begins a stop string.

    The stop string that ends first wins, so the result does not depend on how the text was split; of two that end at
    the same place the longer one wins.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text to release, and the stop string if one ended the text."""
        if not self._stops or not text:
            return text, None
        text = self._held + text
        ends = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, _, stop = min(ends)
            self._held = ""
            return text[: end if self._include else end - len(stop)], stop
        keep = max(_overlap_length(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Return the text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap_length(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
