"""Texts that separate the parts of a format, searched together in text that arrives in pieces. Pure."""

import re


class Markers:
    """Several markers; none begins inside another one."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        self._any = re.compile("|".join(map(re.escape, texts)))
        self._first_sign = re.compile(f"[{re.escape(''.join({text[0] for text in texts}))}]")
        self._longest = max(map(len, texts))

    def split(self, text: str) -> tuple[str, str, str]:
        """Return what is before the first marker, the marker, and the text after it.

        Without a marker, the last part is text that may begin one.
        """
        found = self._any.search(text)
        if found is not None:
            return text[: found.start()], found.group(), text[found.end() :]
        at = max(len(text) - self._longest + 1, 0)
        while (sign := self._first_sign.search(text, at)) is not None:
            at = sign.start()
            begun = text[at:]
            if any(one.startswith(begun) for one in self._texts):
                return text[:at], "", begun
            at += 1
        return text, "", ""
