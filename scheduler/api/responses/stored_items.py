"""The input items of stored responses: as clients list them, each with an id, and page by page. Pure."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from wire.errors import InvalidRequest

Item = Mapping[str, Any]
MAX_PAGE = 100
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_STATUSES = ("in_progress", "completed", "incomplete")
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "reasoning": {"summary": []}, "function_call": {"arguments": ""}, "function_call_output": {"output": ""},
}  # fmt: skip


def stored_items(items: Sequence[Item], response_id: str) -> list[Item]:
    """Return checked items with all fields that clients expect; a given id is kept."""
    return [_stored(item, response_id, at) for at, item in enumerate(items)]


def page_of(items: Sequence[Item], *, limit: int, order: str, after: str | None) -> dict[str, Any]:
    """Return the list object with the items after `after` in this order. Raises InvalidRequest if none has this id."""
    ordered = list(items if order == "asc" else reversed(items))
    first = 0
    if after is not None:
        first = next((at for at, item in enumerate(ordered, 1) if item["id"] == after), 0)
        if not first:
            raise InvalidRequest(f"after is {after!r:.80}, which is not an item of this response", "after")
    page = ordered[first : first + limit]
    ids = [item["id"] for item in page] or [""]
    return {
        "object": "list", "data": page, "first_id": ids[0], "last_id": ids[-1],
        "has_more": first + limit < len(ordered),
    }  # fmt: skip


def _stored(item: Item, response_id: str, at: int) -> Item:
    kind = item["type"]
    digest = hashlib.sha256(f"{response_id} input {at}".encode()).hexdigest()[:32]
    given_id, status = item.get("id"), item.get("status")
    shown = {**item, "status": status if status in _STATUSES else "completed"}
    shown["id"] = given_id if given_id and isinstance(given_id, str) else f"{_PREFIXES[kind]}_{digest}"
    for field, empty in _DEFAULTS.get(kind, {}).items():
        shown[field] = item.get(field) or empty
    if kind == "message":
        shown["content"] = _parts(item.get("content"), is_answer=item.get("role") == "assistant")
    return shown


def _parts(content: Any, *, is_answer: bool) -> Any:
    parts = [{"text": content}] if isinstance(content, str) else content or []
    return [_part(part, is_answer=is_answer) for part in parts]


def _part(part: Mapping[str, Any], *, is_answer: bool) -> Mapping[str, Any]:
    if part.get("type") == "refusal":
        return part
    if part.get("type") == "input_image":
        return {"detail": "auto", **part}
    return {"annotations": [], **part, "type": "output_text"} if is_answer else {**part, "type": "input_text"}
