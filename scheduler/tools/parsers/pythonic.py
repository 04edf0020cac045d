"""Llama 3.2 and 4, ToolACE: calls as a Python list, from the start of the answer or after a special token.

    [weather(city="Paris", days=[1, 2]), now()]

Values become JSON as they arrive: strings, numbers, True, None, lists and dictionaries. A list that does not begin with
a call is content; an invalid value within a call ends the parsing.
"""

import re

from scheduler.tools.call_reader import BLANKS, CallReader, Steps
from scheduler.tools.markers import Markers
from scheduler.tools.python_value import read_value

START, STOP = "<|python_start|>", "<|python_end|>"
MARKERS = (START, STOP)
_START = Markers(START)
_NAME = r"\s*([A-Za-z_][\w.-]*)\s*\(\s*(?=\)|[A-Za-z_]\w*\s*=)"
_FIRST, _NEXT = re.compile(r"\s*\[" + _NAME), re.compile(_NAME)
_BEGINS = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][\w.-]*\s*(?:\(\s*(?:[A-Za-z_]\w*\s*)?)?)?)?")
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=")


def pythonic(reader: CallReader) -> Steps[None]:
    """Send a call's name as soon as it is known and its arguments as they arrive."""
    reader.content((yield from reader.run_of(BLANKS)))
    if reader.next_sign == "[":
        yield from _read_list(reader)
    while (yield from reader.content_until(_START)):
        reader.pending(START)
        yield from _read_list(reader)


def _read_list(reader: CallReader) -> Steps[None]:
    """Read calls up to the end of their list, or to something that is not a call."""
    head = yield from reader.head(_FIRST, begins=_BEGINS)
    while head is not None:
        reader.begin_call(head.group(1))
        if not (yield from _read_arguments(reader)):
            yield from reader.rest_of_text()
            return
        reader.end_call()
        yield from reader.run_of(BLANKS)
        if reader.next_sign != ",":
            return
        reader.text = reader.text[1:]
        head = yield from reader.head(_NEXT)


def _read_arguments(reader: CallReader) -> Steps[bool]:
    """Read the arguments of a call and the bracket after them; return whether they are valid."""
    before = "{"
    while True:
        yield from reader.run_of(BLANKS)
        if reader.next_sign == ")":
            reader.text = reader.text[1:]
            reader.arguments("" if before == "{" else "}")
            return True
        key = yield from reader.head(_KEY)
        if key is None:
            return False
        reader.arguments(f'{before}"{key.group(1)}": ')
        before = ", "
        if not (yield from read_value(reader)):
            return False
        yield from reader.run_of(BLANKS)
        if reader.next_sign == ",":
            reader.text = reader.text[1:]
        elif reader.next_sign != ")":
            return False
