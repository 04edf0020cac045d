"""Read one call written as an object, `{"name": …, "arguments": …}`, while it arrives. Pure."""

import re
from enum import Enum

from scheduler.tools.deltas import ParsedText
from scheduler.tools.json_value import JsonValueEnd

_MAX_HEAD_CHARS = 1024
"""Of the text before the arguments: a longer one is no call whose arguments can be sent as they come."""


class CallState(Enum):
    """What was read of a call so far; OTHER: it does not begin with its name, so only the whole text can be read."""

    HEAD = "head"
    ARGUMENTS = "arguments"
    DONE = "done"
    OTHER = "other"


class CallObject:
    """Call `index`, whose arguments have the name `key`. Its text from the start is `held` until its name is known.

    A `marker` before the arguments ends it, as its length does: then it is no call of this form.
    """

    def __init__(self, index: int, key: str, marker: str | None = None) -> None:
        self.state = CallState.HEAD
        self.held = ""
        self._marker = marker
        self._index = index
        self._head = re.compile(rf'\s*\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"{key}"\s*:\s*(?=["{{\[\-\dtfn])')
        self._end = JsonValueEnd()

    def push(self, text: str, parsed: ParsedText) -> str:
        """Add what is new of the call to `parsed`; return the text after its arguments, if they end here."""
        if self.state is CallState.HEAD:
            self.held += text
            text = self._read_head(parsed)
        if self.state is not CallState.ARGUMENTS or not text:
            return text if self.state is CallState.DONE else ""
        end = self._end.find(text)
        parsed.add_arguments(self._index, text[:end])
        if end is None:
            return ""
        self.state = CallState.DONE
        return text[end:]

    def _read_head(self, parsed: ParsedText) -> str:
        """Return the text after the head, where the arguments begin."""
        found = self._head.match(self.held, 0, _MAX_HEAD_CHARS)
        head = self.held if found is None else found.group()
        name = None if found is None else text_of(found.group(1))
        is_marked = self._marker is not None and self._marker in head
        if found is None or name is None or is_marked:
            if found is not None or is_marked or len(head) > _MAX_HEAD_CHARS:
                self.state = CallState.OTHER
            return ""
        self.state = CallState.ARGUMENTS
        parsed.begin_call(self._index, name)
        rest, self.held = self.held[found.end() :], ""
        return rest


def text_of(literal: str) -> str | None:
    """Return the text of a JSON string, None if it is empty or invalid."""
    import orjson  # not with the flags, which list the formats: tables are checked before heavy imports

    try:
        text = orjson.loads(literal)
    except orjson.JSONDecodeError:
        return None
    return text if isinstance(text, str) and text else None
