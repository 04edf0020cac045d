"""Read a Python literal as the JSON of the same value, while it arrives. Pure; nothing is evaluated."""

import json
import math
import re

from scheduler.tools.call_reader import BLANKS, CallReader, Steps
from scheduler.tools.markers import Markers

_MAX_LEVELS = 50
_WORD_SIGNS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+-."
_WORDS = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
_BRACKETS = {"[": "]", "(": ")", "{": "}"}
_ENDS = {quote: Markers(quote, "\\") for quote in ('"', "'", '"""', "'''")}
_ESCAPE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.)", re.DOTALL)
_LONGEST_ESCAPE = 9
_SIGNS = {
    "\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
    "v": "\v",
}  # fmt: skip


def read_value(reader: CallReader, level: int = 0) -> Steps[bool]:
    """Pass a value on as JSON arguments; return whether it was one and is complete."""
    yield from reader.run_of(BLANKS)
    sign = reader.next_sign
    if sign in ("'", '"'):
        return (yield from _read_text(reader, sign))
    if sign in _BRACKETS and sign and level < _MAX_LEVELS:
        return (yield from _read_items(reader, sign, level + 1))
    word = yield from reader.run_of(_WORD_SIGNS)
    value = (_WORDS.get(word) or _number(word)) if reader.text else None  # at the end of the text it may be cut
    reader.arguments(value or "")
    return value is not None


def _read_items(reader: CallReader, bracket: str, level: int) -> Steps[bool]:
    """Read a list, a tuple, which becomes a list, or a dictionary."""
    is_object, end = bracket == "{", _BRACKETS[bracket]
    reader.text = reader.text[1:]
    reader.arguments("{" if is_object else "[")
    before = ""
    while True:
        yield from reader.run_of(BLANKS)
        if reader.next_sign == end:
            reader.text = reader.text[1:]
            reader.arguments("}" if is_object else "]")
            return True
        reader.arguments(before)
        before = ", "
        if is_object and not (yield from _read_key(reader)):
            return False
        if not (yield from read_value(reader, level)):
            return False
        yield from reader.run_of(BLANKS)
        if reader.next_sign == ",":
            reader.text = reader.text[1:]
        elif reader.next_sign != end:
            return False


def _read_key(reader: CallReader) -> Steps[bool]:
    """Read a dictionary's key, a string, and the colon after it."""
    sign = reader.next_sign
    if sign not in ("'", '"') or not (yield from _read_text(reader, sign)):
        return False
    yield from reader.run_of(BLANKS)
    if reader.next_sign != ":":
        return False
    reader.text = reader.text[1:]
    reader.arguments(": ")
    return True


def _read_text(reader: CallReader, quote: str) -> Steps[bool]:
    """Read a string up to its closing quote; it may contain line breaks."""
    yield from reader.waited(3)
    if reader.text.startswith(quote * 3):
        quote *= 3
    reader.text = reader.text[len(quote) :]
    reader.arguments('"')
    while (marker := (yield from reader.until(_ENDS[quote], lambda text: reader.arguments(_inside(text))))) == "\\":
        yield from reader.waited(_LONGEST_ESCAPE)
        escape = _ESCAPE.match(reader.text)
        if escape is None:
            return False
        reader.text = reader.text[escape.end() :]
        reader.arguments(_escaped(escape))
    reader.arguments('"' if marker else "")
    return bool(marker)


def _escaped(escape: re.Match[str]) -> str:
    """Return the JSON of an escape's character; an escape that Python does not know is kept."""
    byte, short, long, octal, sign = escape.groups()
    if short:
        return f"\\u{short}"
    if sign:
        return _inside(_SIGNS.get(sign, "\\" + sign))
    code = int(octal, 8) if octal else int(byte or long, 16)
    return _inside(chr(code)) if code <= 0x10FFFF and not 0xD800 <= code < 0xE000 else "\\ufffd"


def _inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _number(word: str) -> str | None:
    """Return the JSON of a number, None if JSON has no such number."""
    for base in (10, 0):
        try:
            return str(int(word, base))
        except ValueError:
            pass
    try:
        number = float(word)
    except ValueError:
        return None
    return repr(number) if math.isfinite(number) else None
