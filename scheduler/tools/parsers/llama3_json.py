"""Llama 3.1, 3.2, 3.3 and 4: calls as objects, from the start of the answer or after a special token.

    <|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}

An object that is not a call is content.
"""

from scheduler.tools.call_object import CallObject
from scheduler.tools.call_reader import BLANKS, CallReader, Steps
from scheduler.tools.markers import Markers

TAG = "<|python_tag|>"
MARKERS = (TAG,)
_TAG = Markers(TAG)
_CALL = CallObject("arguments", "parameters")


def llama3_json(reader: CallReader) -> Steps[None]:
    """Send a call's name as soon as it is known and its arguments as they arrive."""
    reader.content((yield from reader.run_of(BLANKS)))
    if reader.next_sign == "{":
        yield from _CALL.read_list(reader)
    while (yield from reader.content_until(_TAG)):
        reader.pending(TAG)
        yield from _CALL.read_list(reader)
