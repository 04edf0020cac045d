"""Qwen3-Coder: each call as a function with its parameters, whose values are plain text.

    <tool_call>
    <function=weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

A value has the type in the tool's schema, and ends at the first marker of this format. `<tool_call>` may be missing.
The name begins a call only if a parameter or the end of the call comes next.
"""

import re

from scheduler.tools.call_reader import BLANKS, MAX_KEY_CHARS, CallReader, Steps
from scheduler.tools.markers import Markers
from scheduler.tools.typed_arguments import TypedArguments

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MARKERS = (BEGIN, END)
_HEADS = {
    BEGIN: re.compile(r"\s*<function=\s*([^<>\n]*[^<>\s])\s*>"),
    FUNCTION: re.compile(r"\s*([^<>\n]*[^<>\s])\s*>"),
}
_BEGIN = Markers(BEGIN, FUNCTION)
_IN_CALL = Markers(PARAMETER, FUNCTION_END, END)
_VALUE_END = Markers(PARAMETER_END, PARAMETER, FUNCTION_END)
_KEY_END = Markers(">")
_AFTER_CALL = Markers(END, BEGIN, FUNCTION)


def qwen3_coder(reader: CallReader) -> Steps[None]:
    """Send a call's name as soon as it is known, and its text arguments as they arrive."""
    marker = yield from reader.content_until(_BEGIN)
    while marker:
        head = yield from reader.head(_HEADS[marker], END)
        gap = "" if head is None else (yield from reader.run_of(BLANKS))
        if head is None or not (yield from reader.follows(_IN_CALL)):
            text = marker if head is None else marker + head.group() + gap
            marker = yield from reader.left_as_content(text, _AFTER_CALL, END, _BEGIN)
            continue
        reader.begin_call(head.group(1))
        marker = yield from _read_parameters(reader, head.group(1))
        if marker:
            reader.end_call()
        if marker == FUNCTION_END:
            marker = yield from reader.content_until(_AFTER_CALL)
        if marker == END:
            marker = yield from reader.content_until(_BEGIN)


def _read_parameters(reader: CallReader, name: str) -> Steps[str]:
    """Read the arguments; return the marker that ends the call, "" at the end of the text."""
    arguments = TypedArguments(reader, name)
    marker = yield from reader.dropped_until(_IN_CALL)
    while marker == PARAMETER:
        key, marker = yield from reader.taken_until(_KEY_END, MAX_KEY_CHARS)
        if marker:
            marker = yield from arguments.read(key.strip(), _VALUE_END, strips_newlines=True)
        if marker == PARAMETER_END or not marker:
            marker = yield from reader.dropped_until(_IN_CALL)
    if marker:
        arguments.end()
    return marker
