"""Calls in a section between markers; each call, a head with its name and a JSON object, has its own markers. Pure."""

import re

from scheduler.tools.call_reader import CallReader, Steps
from scheduler.tools.markers import Markers


class SectionCalls:
    """The form of such calls. `head` matches what is before the arguments: its groups are `name` and perhaps `id`."""

    def __init__(self, section: tuple[str, str], call: tuple[str, str], head: str) -> None:
        self.markers = (*section, *call)
        self._section, self._section_end = section
        self._call, self._call_end = call
        self._head = re.compile(head)
        self._begin = Markers(self._section)
        self._inside = Markers(self._call, self._section_end)
        self._after_call = Markers(self._call_end, self._call, self._section_end)
        self._after_text = Markers(self._call_end, self._section_end)

    def steps(self, reader: CallReader) -> Steps[None]:
        """Read sections; text within one that is not a call is content."""
        while (yield from reader.content_until(self._begin)):
            reader.pending(self._section)
            marker = yield from reader.content_until(self._inside)
            while marker and marker != self._section_end:
                if marker == self._call:
                    marker = yield from self._read_call(reader)
                else:
                    marker = yield from reader.content_until(self._inside)
            reader.pending(marker)

    def _read_call(self, reader: CallReader) -> Steps[str]:
        """Read one call; return the marker that ends it, "" at the end of the text."""
        head = yield from reader.head(self._head, self._call_end)
        if head is None:
            reader.not_a_call(self._call)
            marker = yield from reader.not_a_call_until(self._after_text)
            reader.not_a_call(marker)
            return marker
        reader.begin_call(head.group("name"), head.groupdict().get("id"))
        yield from reader.json_arguments()
        marker = yield from reader.dropped_until(self._after_call)
        if marker:
            reader.end_call()
        return marker
