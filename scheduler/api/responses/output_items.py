"""The output items of a response: reasoning, messages and function calls, complete or still empty."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from scheduler.api.answer_shape import CompleteChoice
from scheduler.tools.deltas import CallDelta

_PREFIXES = {"thinking": "rs", "text": "msg", "tool_use": "fc"}
COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"


@dataclass(slots=True)
class OutputItem:
    """One item while it is made. `kind` is thinking, text or tool_use; `call` has the name and the id of a call."""

    kind: str
    item_id: str
    call: CallDelta | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: Any = field(default_factory=list)  # of a message; a list or its JSON

    @property
    def text(self) -> str:
        """The item's text so far, or the call's arguments."""
        return "".join(self.texts)

    def part(self) -> dict[str, Any]:
        """Return the only content part of reasoning or of a message."""
        if self.kind == "thinking":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def shown(self, status: str) -> dict[str, Any]:
        """Return the item as clients see it, without a content part while it is in progress."""
        content = [] if status == IN_PROGRESS else [self.part()]
        head = {"id": self.item_id, "status": status}
        if self.call is not None:
            call = {"call_id": self.call.call_id, "name": self.call.name, "arguments": self.text}
            return head | {"type": "function_call"} | call
        if self.kind == "thinking":
            return head | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return head | {"type": "message", "role": "assistant", "content": content}


def new_item(origin: bytes, at: int, kind: str, call: CallDelta | None = None) -> OutputItem:
    """Return item number `at` of the response to the request that `origin` identifies."""
    digest = hashlib.sha256(b"%b item %d" % (origin, at)).hexdigest()
    return OutputItem(kind, f"{_PREFIXES[kind]}_{digest[:32]}", call)


def items_of(choice: CompleteChoice, origin: bytes) -> list[OutputItem]:
    """Return the items of a complete choice; an answer without any text becomes an empty message.

    The choice's log probabilities are lists by the number of the message, from 0.
    """
    calls, num_messages, items = iter(choice.calls), 0, list[OutputItem]()
    for at, (kind, text) in enumerate(choice.blocks or [("text", "")]):
        item = new_item(origin, at, kind, next(calls) if kind == "tool_use" else None)
        item.texts = [text if item.call is None else item.call.arguments]
        if kind == "text" and choice.logprobs is not None:
            item.logprobs = choice.logprobs.get(str(num_messages), [])
        num_messages += kind == "text"
        items.append(item)
    return items
