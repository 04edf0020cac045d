"""Read `instructions` and the items of `input` into the form that chat templates expect. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.images.image_part import read_image_part
from scheduler.tools.history import read_arguments
from wire.errors import InvalidRequest

Message = dict[str, Any]
Item = Mapping[str, Any]
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_MEDIA = frozenset(("input_file", "input_audio", "computer_screenshot"))
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of parts that are text, and the field of each type that has the text."""
_UNFINISHED = ("in_progress", "incomplete")


def read_items(given: Any) -> list[Item]:
    """Return the items of `input`, each with its type; a text is one message.

    Raises InvalidRequest with the path of the field.
    """
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidRequest("input must be a text or a list of at least one item", "input")
    for at, item in enumerate(given):
        if not isinstance(item, dict):
            raise InvalidRequest(f"input.{at} is not an object", f"input.{at}")
    return [{**item, "type": "message"} if item.get("type") is None else item for item in given]


def read_conversation(items: Sequence[Item], instructions: str | None, *, num_earlier: int = 0) -> list[Message]:
    """Return the conversation for a template. Raises InvalidRequest with the path of the field.

    The first `num_earlier` items are those of the responses that this one continues. Reasoning, text and calls that
    follow each other are one message of the assistant.
    """
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    num_before, calls = len(messages), set[str]()
    for at, item in enumerate(items):
        path = f"input.{at - num_earlier}"
        match item["type"]:
            case "message":
                _add_message(messages, item, path)
            case "reasoning":
                _add_reasoning(messages, item, path)
            case "function_call":
                calls.add(_add_call(messages, item, path))
            case "function_call_output":
                messages.append(_result(item, path, calls))
            case "item_reference":
                raise InvalidRequest(f"{path}: references to items are not supported: send the item itself", path)
            case kind:
                raise InvalidRequest(
                    f"{path}.type is {str(kind)[:40]!r}, but must be message, function_call, function_call_output or "
                    "reasoning",
                    f"{path}.type",
                )
    if len(messages) == num_before:
        raise InvalidRequest("input has no item with content", "input")
    for message in messages:
        if "reasoning" in message:
            message |= dict.fromkeys(("reasoning", "reasoning_content"), "".join(message["reasoning"]))
    return messages


def continues_answer(items: Sequence[Item]) -> bool:
    """Return whether the last item is the unfinished beginning of the answer."""
    last = items[-1]
    is_answer = last["type"] == "message" and last.get("role") == "assistant" and bool(last.get("content"))
    return is_answer and last.get("status") in _UNFINISHED


def _add_message(messages: list[Message], item: Item, path: str) -> None:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{path}.role must be one of {', '.join(_ROLES)}", f"{path}.role")
    content = _content(item.get("content"), f"{path}.content")
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("role") == "assistant" and not (last["content"] or "tool_calls" in last):
        last["content"] = content  # so far it has only the reasoning
    else:
        messages.append({"role": _ROLES[role], "content": content})


def _add_reasoning(messages: list[Message], item: Item, path: str) -> None:
    texts: list[str] = []
    for field in ("content", "summary"):  # the summary is read only if there is no content
        parts = item.get(field) or []
        if not isinstance(parts, list):
            raise InvalidRequest(f"{path}.{field} is not a list", f"{path}.{field}")
        texts = texts or [_field(part, "text", f"{path}.{field}.{at}") for at, part in enumerate(parts)]
    if not texts:
        return  # encrypted: only the server that sent it can read it
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last["content"]:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    last.setdefault("reasoning", []).extend(texts)  # joined at the end


def _add_call(messages: list[Message], item: Item, path: str) -> str:
    """Add a call to the assistant's message, and return its id."""
    call_id, name = _field(item, "call_id", path), _field(item, "name", path)
    arguments = item.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        raise InvalidRequest(f"{path}.arguments is not a string", f"{path}.arguments")
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    last = messages[-1]
    last["content"] = last["content"] or []
    function = {"name": name, "arguments": read_arguments(arguments)}
    last.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
    return call_id


def _result(item: Item, path: str, calls: set[str]) -> Message:
    call_id = _field(item, "call_id", path)
    if call_id not in calls:
        raise InvalidRequest(
            f"{path}.call_id is {call_id[:80]!r}, but no function_call before it has this id", f"{path}.call_id"
        )
    output = item.get("output")
    content = _content(output, f"{path}.output") if output else ""
    parts = [{"text": content}] if isinstance(content, str) else content
    if any("image" in part for part in parts):
        raise InvalidRequest(f"{path}.output: the output of a function is text, without images", f"{path}.output")
    return {"role": "tool", "content": "\n".join(part["text"] for part in parts), "tool_call_id": call_id}


def _content(given: Any, path: str) -> str | list[dict[str, Any]]:
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given:
        raise InvalidRequest(f"{path} must be a text or a list of parts", path)
    parts = [_part(part, f"{path}.{at}") for at, part in enumerate(given)]
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _part(part: Any, path: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_image":
        if part.get("image_url") is None and part.get("file_id") is not None:
            raise InvalidRequest(f"{path}: files cannot be named by id: send image_url", path)
        return read_image_part({"image_url": {"url": part.get("image_url"), "detail": part.get("detail")}}, path)
    if isinstance(kind, str) and kind in _MEDIA:
        raise InvalidRequest(f"{path}: {kind} parts are not supported yet", path)
    if not isinstance(kind, str) or kind not in _TEXTS:
        shown = f"the type is {kind[:40]!r}, but " if isinstance(kind, str) else "the type of a part "
        raise InvalidRequest(f"{path}: {shown}must be input_text, output_text or input_image", path)
    return {"type": "text", "text": _field(part, _TEXTS[kind], path, may_be_empty=True)}


def _field(item: Any, name: str, path: str, *, may_be_empty: bool = False) -> str:
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, str) or not (value or may_be_empty):
        raise InvalidRequest(f"{path}.{name} must be a {'' if may_be_empty else 'non-empty '}text", f"{path}.{name}")
    return value
