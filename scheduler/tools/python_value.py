"""Read a Python literal as the JSON of the same value, while it arrives. Pure; nothing is evaluated."""

import json
import math
import re
import unicodedata
from collections.abc import Callable
from typing import TypeAlias

from scheduler.tools.call_reader import BLANKS, CallReader, Steps
from scheduler.tools.markers import Markers

Sink: TypeAlias = Callable[[str], None]
"""Takes JSON as it is read."""
_MAX_LEVELS = 50
_WORD_SIGNS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+-."
_WORDS = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
_BRACKETS = {"[": "]", "(": ")", "{": "}"}
_PREFIXES = ("", "r", "u", "f", "rf", "fr")
_ENDS = {quote: Markers(quote, "\\") for quote in ('"', "'", '"""', "'''")}
_FORMAT_ENDS = {quote: Markers(quote, "\\", "{", "}") for quote in _ENDS}
_NAME_END, _LINE_END = Markers("}"), Markers("\n")
_ESCAPE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.)", re.DOTALL)
_LONGEST_ESCAPE = 9
_LONGEST_NAME = 100
_SIGNS = {
    "\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
    "v": "\v",
}  # fmt: skip


def read_gap(reader: CallReader) -> Steps[str]:
    """Read white space and comments; return them."""
    gap = yield from reader.run_of(BLANKS)
    while reader.next_sign == "#":
        comment, line_end = yield from reader.taken_until(_LINE_END)
        gap += comment + line_end + (yield from reader.run_of(BLANKS))
    return gap


def put_back(reader: CallReader, gap: str) -> None:
    """Put back what read_gap returned, if text follows it."""
    reader.text = gap + reader.text if reader.text else ""


def read_value(reader: CallReader, write: Sink, level: int = 0) -> Steps[bool]:
    """Write a value as JSON; return whether it was one and is complete. An invalid word is not read."""
    yield from read_gap(reader)
    if (bracket := reader.next_sign) in _BRACKETS and bracket and level < _MAX_LEVELS:
        return (yield from _read_items(reader, write, bracket, level + 1))
    word = yield from reader.run_of(_WORD_SIGNS)
    quote = reader.next_sign
    if quote in ("'", '"') and word.lower() in _PREFIXES:
        return (yield from _read_text(reader, write, quote, word.lower()))
    if word in ("+", "-"):
        word += yield from reader.run_of(BLANKS)
        word += yield from reader.run_of(_WORD_SIGNS)
    if not reader.text:  # it may be cut
        return False
    value = _WORDS.get(word) or _number(word)
    if value is None:
        reader.text = word + reader.text
        return False
    write(value)
    return True


def _read_items(reader: CallReader, write: Sink, bracket: str, level: int) -> Steps[bool]:
    """Read a list, tuple, set, dictionary or parenthesised value; tuples and sets become lists.

    The first item is held back until it is clear which of these it is; keys are held back too.
    """
    end, held = _BRACKETS[bracket], list[str]()
    kind = "[]" if bracket == "[" else ""
    reader.text = reader.text[1:]
    write("[" if kind else "")
    before = ""
    while True:
        yield from read_gap(reader)
        if reader.next_sign == end:
            reader.text = reader.text[1:]
            write(kind[1:] or ("{}" if bracket == "{" else "[]"))
            return True
        write(before)
        before = ", "
        if not (yield from read_value(reader, write if kind == "[]" else held.append, level)):
            return False
        gap = yield from read_gap(reader)
        sign = reader.next_sign
        if not kind and sign in (",", end):
            if bracket == "(" and sign == end:
                reader.text = reader.text[1:]
                write("".join(held))
                return True
            kind = "[]"
            write("[" + "".join(held))
        elif kind != "[]":
            key = _key("".join(held))
            if bracket != "{" or sign != ":" or key is None:
                put_back(reader, gap)
                return False
            write(f"{'' if kind else '{'}{key}: ")
            kind = "{}"
            held.clear()
            reader.text = reader.text[1:]
            if not (yield from read_value(reader, write, level)):
                return False
            gap = yield from read_gap(reader)
        if reader.next_sign == ",":
            reader.text = reader.text[1:]
        elif reader.next_sign != end:
            put_back(reader, gap)
            return False


def _key(literal: str) -> str | None:
    """Return a value's JSON as the key of an object, None for a list or an object."""
    if literal.startswith(("[", "{")):
        return None
    return literal if literal.startswith('"') else f'"{literal}"'


def _read_text(reader: CallReader, write: Sink, quote: str, prefix: str) -> Steps[bool]:
    """Read a string up to its closing quote; it may contain line breaks."""
    yield from reader.waited(3)
    if reader.text.startswith(quote * 3):
        quote *= 3
    reader.text = reader.text[len(quote) :]
    write('"')
    ends = (_FORMAT_ENDS if "f" in prefix else _ENDS)[quote]
    while (marker := (yield from reader.until(ends, lambda text: write(_inside(text))))) and marker != quote:
        if marker != "\\":
            yield from reader.waited(1)
            if reader.next_sign != marker:  # a placeholder of an f-string
                reader.text = marker + reader.text
                return False
            reader.text = reader.text[1:]
            write(marker)
        elif "r" in prefix:
            yield from reader.waited(1)
            write(_inside("\\" + reader.next_sign))
            reader.text = reader.text[1:]
        elif not (yield from _read_escape(reader, write)):
            return False
    write('"' if marker else "")
    return bool(marker)


def _read_escape(reader: CallReader, write: Sink) -> Steps[bool]:
    """Read the escape after a backslash; return whether it is complete and has a character."""
    yield from reader.waited(_LONGEST_ESCAPE)
    if reader.text.startswith("N{"):
        name, marker = yield from reader.taken_until(_NAME_END, _LONGEST_NAME)
        try:
            sign = unicodedata.lookup(name[2:]) if marker else ""
        except (KeyError, ValueError):
            sign = ""
        if not sign and (marker or reader.text):  # otherwise it is cut
            reader.text = "\\" + name + marker + reader.text
        write(_inside(sign))
        return bool(sign)
    escape = _ESCAPE.match(reader.text)
    if escape is None:
        return False
    reader.text = reader.text[escape.end() :]
    write(_escaped(escape))
    return True


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
    sign, digits = (word[0], word[1:].lstrip(BLANKS)) if word[:1] in ("+", "-") else ("", word)
    for base in (10, 0):
        try:
            return str(int(sign + digits, base))
        except ValueError:
            pass
    try:
        number = float(sign + digits)
    except ValueError:
        return None
    return repr(number) if math.isfinite(number) else None
