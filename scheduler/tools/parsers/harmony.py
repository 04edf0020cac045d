"""gpt-oss: an answer is a series of messages, each with a channel and perhaps a recipient in its header.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is cold.<|return|>

Content is the text of the channel final, and of commentary without a recipient. The thinking of the channel analysis is
left out, unless a reasoning parser has read it before. A header that is cut off is left out too.
"""

import re

from scheduler.tools.call_reader import MAX_HEAD_CHARS, CallReader, Steps
from scheduler.tools.markers import Markers

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_BEGIN, _MESSAGE = Markers(START, CHANNEL), Markers(MESSAGE)
_AFTER_MESSAGE = Markers(END, CALL, RETURN, START, CHANNEL)
_RECIPIENT = re.compile(r"\bto=(functions\.)?([^\s<]+)")
_TO, _TO_BEGINS = re.compile(r"\s*to=[^<]*(?=<\|channel\|>)"), re.compile(r"\s*(?:t(?:o(?:=[^<]*(?:<[^>]*)?)?)?)?")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")


def harmony(reader: CallReader) -> Steps[None]:
    """Send a call's name after its header, and texts as they arrive."""
    to = yield from reader.head(_TO, begins=_TO_BEGINS)  # after the prompt's <|start|>assistant
    before = "" if to is None else to.group()
    marker = yield from reader.content_until(_BEGIN)
    while marker:
        header, found = yield from reader.taken_until(_MESSAGE, MAX_HEAD_CHARS)
        if found:
            marker = yield from _read_message(reader, before + marker + header)
        elif not reader.is_over:
            reader.not_a_call(marker + header)
        before = ""
        if marker not in (START, CHANNEL) or not found:
            marker = yield from reader.content_until(_BEGIN)


def _read_message(reader: CallReader, header: str) -> Steps[str]:
    """Read the text of one message; return the marker after it, "" at the end of the text."""
    recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
    if recipient is not None and recipient.group(1):
        reader.begin_call(recipient.group(2))
        marker = yield from reader.until(_AFTER_MESSAGE, reader.arguments)
        if marker:
            reader.end_call()
        return marker
    if recipient is not None or channel is None or channel.group(1) not in ("final", "commentary"):
        return (yield from reader.dropped_until(_AFTER_MESSAGE))
    return (yield from reader.content_until(_AFTER_MESSAGE))
