"""Find where a JSON value that arrives in pieces ends. Pure; every character is read once."""

import re

_SIGN = re.compile(r'["{}\[\]]')
_IN_TEXT = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s<]")


class JsonValueEnd:
    """Counts brackets and quotes of one value, which need not be valid: its end is where the first one closes."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_text = False
        self._is_escaped = False
        self._is_scalar = False

    def find(self, text: str) -> int | None:
        """Return how much of `text`, the next piece, belongs to the value, None if it may go on."""
        at = 0
        if self._is_escaped and text:
            self._is_escaped, at = False, 1
        if not (self._depth or self._is_text or self._is_scalar) and text:
            self._is_scalar = text[0] not in '"{['
        if self._is_scalar:
            found = _SCALAR_END.search(text)
            return None if found is None else found.start()
        while (found := (_IN_TEXT if self._is_text else _SIGN).search(text, at)) is not None:
            at = found.end()
            if (sign := found.group()) == "\\":
                self._is_escaped = at == len(text)
                at += 1
                continue
            if sign == '"':
                self._is_text = not self._is_text
            else:
                self._depth += 1 if sign in "{[" else -1
            if not self._is_text and self._depth <= 0:
                return at
        return None
