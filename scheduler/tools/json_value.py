"""Find where a JSON value that arrives in pieces ends. Pure; every character is read once."""

import json
import re

_SIGN = re.compile(r'["{}\[\]<]')
_IN_TEXT = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s<]")


_KEY = re.compile(r'[\s{,]*("(?:[^"\\]|\\.)*")\s*:\s*')


def raw_field(text: str, name: str) -> str | None:
    """Return the text of the value of a JSON object's field, the last one of that name. The object must be valid."""
    at, value = 0, None
    while (key := _KEY.match(text, at)) is not None:
        end = JsonValueEnd().find(text, key.end())
        assert end is not None
        if json.loads(key.group(1)) == name:
            value = text[key.end() : end]
        at = end
    return value


class JsonValueEnd:
    """Counts the brackets and quotes of one value, valid or not: it ends where the first bracket or quote closes.

    A `<` outside of strings, which JSON never has, ends it too: a marker begins there, and the value was not closed.
    `depth` is how many objects and lists are open before the text; the value then includes their ends.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_text = False
        self._is_escaped = False
        self._is_scalar = False

    def find(self, text: str, at: int = 0) -> int | None:
        """Return where the value ends in the next piece, `text` from `at` on; None if the value may go on."""
        if self._is_escaped and text:
            self._is_escaped, at = False, at + 1
        if not (self._depth or self._is_text or self._is_scalar) and text:
            self._is_scalar = text[at] not in '"{['
        if self._is_scalar:
            found = _SCALAR_END.search(text, at)
            return None if found is None else found.start()
        while (found := (_IN_TEXT if self._is_text else _SIGN).search(text, at)) is not None:
            at = found.end()
            if (sign := found.group()) == "\\":
                self._is_escaped = at == len(text)
                at += 1
                continue
            if sign == '"':
                self._is_text = not self._is_text
            elif sign == "<":
                return found.start()
            else:
                self._depth += 1 if sign in "{[" else -1
            if not self._is_text and self._depth <= 0:
                return at
        return None
