"""Llama 3.2 and 4, ToolACE: calls as a Python list, from the start of the answer or after a special token.

    [weather(city="Paris", days=[1, 2]), now()]

Values become JSON as they arrive: strings, numbers, True, None, lists and dictionaries. A call begins once its first
value is known to be valid. What is not a call is content, and so is everything after an invalid value within a call.
"""

import re

from scheduler.tools.call_reader import BLANKS, CallReader, Steps
from scheduler.tools.markers import Markers
from scheduler.tools.python_value import put_back, read_gap, read_value

START, STOP = "<|python_start|>", "<|python_end|>"
MARKERS = (START, STOP)
_START = Markers(START)
_WORD = r"(?:[Tt]rue|[Ff]alse|None|null|(?:[+-]\s*)?\.?\d[\w.+-]*)\s*[,)#]"
_VALUE = rf"""(?:[rRuUfF]|[rR][fF]|[fF][rR])?["']|[\[({{]|{_WORD}"""
_NAME = rf"\s*([A-Za-z_][\w.-]*)\s*\(\s*(?=\)\s*[],#]|[A-Za-z_]\w*\s*=\s*(?:{_VALUE}))"
_FIRST, _NEXT = re.compile(r"\s*\[" + _NAME), re.compile(_NAME)
_VALUE_BEGINS = r"(?:[+-]\s*)?(?:[\w.][\w.+-]*\s*)?"
_ARGUMENT_BEGINS = rf"(?:\)\s*|[A-Za-z_]\w*\s*(?:=\s*{_VALUE_BEGINS})?)?"
_NAME_BEGINS = rf"(?:[A-Za-z_][\w.-]*\s*(?:\(\s*{_ARGUMENT_BEGINS})?)?"
_FIRST_BEGINS, _NEXT_BEGINS = re.compile(rf"\s*(?:\[\s*{_NAME_BEGINS})?"), re.compile(rf"\s*{_NAME_BEGINS}")
_KEY, _KEY_BEGINS = re.compile(r"([A-Za-z_]\w*)\s*="), re.compile(r"(?:[A-Za-z_]\w*\s*)?")


def pythonic(reader: CallReader) -> Steps[None]:
    """Send a call's name as soon as it is known and its arguments as they arrive."""
    reader.content((yield from reader.run_of(BLANKS)))
    marker = yield from _read_list(reader) if reader.next_sign == "[" else reader.content_until(_START)
    while marker:
        reader.pending(START)
        marker = yield from _read_list(reader)


def _read_list(reader: CallReader) -> Steps[str]:
    """Read calls and the text after them; return the marker of the next list, "" at the end of the text."""
    head = yield from reader.head(_FIRST, begins=_FIRST_BEGINS)
    while head is not None:
        reader.begin_call(head.group(1))
        if not (yield from _read_arguments(reader)):
            reader.cut_call()
            return (yield from reader.not_a_call_until(_START))
        reader.end_call()
        yield from read_gap(reader)
        if reader.next_sign != ",":
            break
        reader.text = reader.text[1:]
        yield from read_gap(reader)
        head = yield from reader.head(_NEXT, begins=_NEXT_BEGINS)
        if head is None and reader.next_sign != "]":
            return (yield from reader.not_a_call_until(_START))
    return (yield from reader.content_until(_START))


def _read_arguments(reader: CallReader) -> Steps[bool]:
    """Read the arguments of a call and the bracket after them; return whether they are valid.

    If not, the rest of the text begins at the invalid part; a value that the end of the text cuts off is left out.
    """
    before = "{"
    while True:
        yield from read_gap(reader)
        if reader.next_sign == ")":
            reader.text = reader.text[1:]
            reader.arguments("" if before == "{" else "}")
            return True
        key = yield from reader.head(_KEY, begins=_KEY_BEGINS)
        if key is None:
            if reader.is_over and _KEY_BEGINS.fullmatch(reader.text):
                reader.text = ""
            return False
        reader.arguments(f'{before}"{key.group(1)}": ')
        before = ", "
        if not (yield from read_value(reader, reader.arguments)):
            return False
        gap = yield from read_gap(reader)
        if reader.next_sign == ",":
            reader.text = reader.text[1:]
        elif reader.next_sign != ")":
            put_back(reader, gap)
            return False
