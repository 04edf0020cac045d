"""Mistral: calls after a marker that is a special token, in the form of older or newer tokenizers.

[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, …]
[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}
[TOOL_CALLS]weather{"city": "Paris"}
"""

import re

from scheduler.tools.call_object import CallObject
from scheduler.tools.call_reader import CallReader, Steps
from scheduler.tools.markers import Markers

CALLS = "[TOOL_CALLS]"
MARKERS = (CALLS, "[ARGS]", "[CALL_ID]")
_CALLS = Markers(CALLS)
_CALL = CallObject("arguments", marker=CALLS, reads_text=True)
_HEAD = re.compile(r"\s*(?:\[?\s*|(?P<name>[^\s\[{]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\]\s*)?)(?=\{)")


def mistral(reader: CallReader) -> Steps[None]:
    """Send a call's name as soon as it is known and its arguments as they arrive."""
    while (yield from reader.content_until(_CALLS)):
        reader.pending(CALLS)
        head = yield from reader.head(_HEAD, CALLS)
        if head is None:
            continue
        if (name := head.group("name")) is None:
            reader.pending(head.group())
            yield from _CALL.read_list(reader)
        else:
            reader.begin_call(name)
            if (yield from reader.json_arguments()):
                reader.end_call()
