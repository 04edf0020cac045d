"""How one request's text becomes calls, and the ids of its calls."""

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.tools.deltas import ToolCallParser


@dataclass(frozen=True, slots=True)
class CallOptions:
    """`make_parser` returns a parser for each choice; `origin` identifies the request in the ids of its calls.

    `finish_reason`, unless None, replaces `stop` if a choice has calls. `max_calls`: further calls are left out.
    `forced`: a grammar allows only calls. `markers` are texts that the parser needs even if they are special tokens.
    `short_ids`: ids have nine letters and digits, which some chat templates require of the calls in a conversation.
    """

    make_parser: Callable[[], ToolCallParser]
    origin: bytes
    finish_reason: str | None = "tool_calls"
    max_calls: int | None = None
    forced: bool = False
    markers: tuple[str, ...] = ()
    short_ids: bool = False

    def call_id(self, choice: int, call: int) -> str:
        """Return the id of a choice's call: the same whenever the same request is repeated."""
        digest = hashlib.sha256(b"%b %d %d" % (self.origin, choice, call)).hexdigest()
        return digest[:9] if self.short_ids else f"call_{digest[:24]}"


def call_origin(request_id: str, prompt: tuple[int, ...]) -> bytes:
    """Return what identifies a request: a client may send the same id with each turn of a conversation."""
    return hashlib.sha256(request_id.encode() + b" " + array("I", prompt).tobytes()).digest()
