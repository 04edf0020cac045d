"""Hermes, Qwen2.5 and Qwen3: content, then each call as an object between two markers.

    Let me look.
    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

Text between markers that is not a call is content. A call that has all of its arguments ends at the next marker of
either kind.
"""

from scheduler.tools.call_object import CallObject
from scheduler.tools.call_reader import CallReader, Steps
from scheduler.tools.markers import Markers

BEGIN, END = "<tool_call>", "</tool_call>"
MARKERS = (BEGIN, END)
_BEGIN, _END, _EITHER = Markers(BEGIN), Markers(END), Markers(BEGIN, END)
_CALL = CallObject("arguments", marker=END)


def hermes(reader: CallReader) -> Steps[None]:
    """Send a call's name as soon as it is known and its arguments as they arrive."""
    marker = yield from reader.content_until(_BEGIN)
    while marker:
        if (yield from _CALL.read(reader)):
            marker = yield from reader.dropped_until(_EITHER)
            if marker:
                reader.end_call()
        else:
            inside, marker = yield from reader.taken_until(_END)
            if not _CALL.add_whole(reader, inside):
                reader.not_a_call(BEGIN + inside + marker)
        if marker != BEGIN:
            marker = yield from reader.content_until(_BEGIN)
