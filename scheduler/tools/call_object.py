"""Read a call written as an object, `{"name": …, "arguments": …}`. Pure."""

import json
import re
from typing import Any

from scheduler.tools.call_reader import CallReader, Steps
from scheduler.tools.json_value import JsonValueEnd, raw_field

_BETWEEN = " \t\r\n,;[]"
_NO_OBJECT = ('"', "n")
"""Characters with which a JSON string and null begin."""


class CallObject:
    """The form of such calls: `keys` are the names that the arguments may have.

    If a `marker` or too much text comes before the arguments, the object is not a call of this form.
    With `reads_text`, arguments written as a JSON string are the text in the string, and null means no arguments.
    """

    def __init__(self, *keys: str, marker: str | None = None, reads_text: bool = False) -> None:
        self._keys = keys
        self._reads_text = reads_text
        self._marker = marker
        self._head = re.compile(
            rf'\s*\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:{"|".join(keys)})"\s*:\s*(?=["{{\[\-\dtfn])'
        )

    def read(self, reader: CallReader) -> Steps[bool]:
        """Read up to the end of the arguments; False, and nothing is read, if the call does not begin with its name."""
        head = yield from reader.head(self._head, self._marker)
        name = None if head is None else text_of(head.group(1))
        if head is None or name is None:
            reader.text = reader.text if head is None else head.group() + reader.text
            return False
        reader.begin_call(name)
        if self._reads_text and reader.next_sign in _NO_OBJECT:
            literal: list[str] = []
            has_ended = yield from reader.json_value(literal.append, JsonValueEnd())
            reader.arguments(_text_in("".join(literal)) if has_ended else "")
        else:
            yield from reader.json_arguments()
        return True

    def read_list(self, reader: CallReader) -> Steps[None]:
        """Read calls and their separators, up to other text or something that is not a call."""
        while True:
            reader.pending((yield from reader.run_of(_BETWEEN)))
            if reader.next_sign != "{":
                return
            if (yield from self.read(reader)):
                if (yield from reader.rest_of_object()):
                    reader.end_call()
                continue
            taken: list[str] = []
            yield from reader.json_value(taken.append, JsonValueEnd())
            text = "".join(taken)
            if not self.add_whole(reader, text):
                reader.not_a_call(text)
                return

    def add_whole(self, reader: CallReader, text: str) -> bool:
        """Add a call with its fields in any order; return whether `text` is one."""
        call = _decoded(text)
        name = call.get("name") if isinstance(call, dict) else None
        key = next((key for key in self._keys if isinstance(call, dict) and key in call), None)
        if not isinstance(name, str) or not name or key is None:
            return False
        reader.begin_call(name)
        written = raw_field(text, key) or ""
        reader.arguments(_text_in(written) if self._reads_text and written[:1] in _NO_OBJECT else written)
        reader.end_call()
        return True


def _decoded(text: str) -> Any:
    """Return a JSON value, None if it is invalid; half of a surrogate pair, or a number out of range, is valid."""
    import orjson  # late: the flags import this module to list the formats, before heavy imports

    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return None


def _text_in(literal: str) -> str:
    """Return the text of a JSON string, "" for null."""
    return "" if literal == "null" else text_of(literal) or ""


def text_of(literal: str) -> str | None:
    """Return the text of a JSON string, None if it is empty or invalid."""
    import orjson  # as above

    try:
        text = orjson.loads(literal)
    except orjson.JSONDecodeError:
        return None
    return text if isinstance(text, str) and text else None
