"""GLM-4.5, 4.6 and 4.7: each call as its name, then keys and values, which are plain text or JSON.

    <tool_call>weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

A value has the type that the tool's schema gives it, and ends at the first </arg_value> or </tool_call>. The name
must be that of a tool, as in vLLM: nothing else shows that text between the markers is a call.
"""

import re

from scheduler.tools.call_reader import MAX_KEY_CHARS, CallReader, Steps
from scheduler.tools.markers import Markers
from scheduler.tools.typed_arguments import TypedArguments

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
MARKERS = (BEGIN, END, KEY, KEY_END, VALUE, VALUE_END)
_HEAD = re.compile(r"\s*([^\s<]+)\s*(?=<arg_key>|</tool_call>)")
_BEGIN, _EITHER, _KEY_END = Markers(BEGIN), Markers(BEGIN, END), Markers(KEY_END)
_IN_CALL = Markers(KEY, END)
_AFTER_KEY = Markers(VALUE, KEY, END)
_VALUE_END = Markers(VALUE_END, END)


def glm45(reader: CallReader) -> Steps[None]:
    """Send a call's name as soon as it is known, and its text arguments as they arrive."""
    marker = yield from reader.content_until(_BEGIN)
    while marker:
        head = yield from reader.head(_HEAD, END)
        if head is None or head.group(1) not in reader.schemas:
            text = BEGIN if head is None else BEGIN + head.group()
            marker = yield from reader.left_as_content(text, _EITHER, END, _BEGIN)
            continue
        reader.begin_call(head.group(1))
        arguments = TypedArguments(reader, head.group(1))
        marker = yield from reader.dropped_until(_IN_CALL)
        while marker == KEY:
            marker = yield from _read_pair(reader, arguments)
        if marker:
            arguments.end()
            reader.end_call()
            marker = yield from reader.content_until(_BEGIN)


def _read_pair(reader: CallReader, arguments: TypedArguments) -> Steps[str]:
    """Read a key and its value; return the marker after them, "" at the end of the text."""
    key, marker = yield from reader.taken_until(_KEY_END, MAX_KEY_CHARS)
    if marker:
        marker = yield from reader.dropped_until(_AFTER_KEY)
    if marker == VALUE:
        marker = yield from arguments.read(key.strip(), _VALUE_END)
    return (yield from reader.dropped_until(_IN_CALL)) if marker in (VALUE_END, "") else marker
