"""Read `messages` into the form that chat templates expect."""

from collections.abc import Mapping
from typing import Any

from scheduler.images.image_part import read_embeds_part, read_image_part
from scheduler.tools.history import TOOL_ROLES, check_results, read_calls
from wire.errors import InvalidRequest

Message = dict[str, Any]


def read_messages(value: Any) -> list[Message]:
    """Return the conversation for a template: roles, contents as sent (texts or lists of parts), and tool calls."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a list of at least one message", "messages")
    messages = [_message(item, f"messages.{index}") for index, item in enumerate(value)]
    check_results(messages)
    return messages


def _message(value: Any, path: str) -> Message:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} is not an object", path)
    role = value.get("role")
    if not isinstance(role, str) or not 1 <= len(role) <= 64:
        raise InvalidRequest(f"{path}.role must be a string such as user, system or assistant", f"{path}.role")
    content = value.get("content")
    if role in TOOL_ROLES:
        return {"role": "tool", "content": _result(content, f"{path}.content")} | _result_names(value, path)
    calls = {"tool_calls": read} if role == "assistant" and (read := read_calls(value, path)) else {}
    checked = [] if calls and not content else _check_content(content, f"{path}.content")
    return {"role": role, "content": checked} | calls | _other_fields(value)


def _result(value: Any, path: str) -> str:
    """Return the text of a tool's result: templates expect one even where other contents are lists of parts."""
    content = _check_content(value, path) if value else ""
    if isinstance(content, list) and any("image" in part for part in content):
        raise InvalidRequest(f"{path}: the result of a tool is text, without images", path)
    return text_of(content)


def _result_names(value: Mapping[str, Any], path: str) -> Message:
    """Return the id of the call that a result is for, and the function's name."""
    names = {key: value[key] for key in ("tool_call_id", "name") if value.get(key) is not None}
    for key, name in names.items():
        if not isinstance(name, str):
            raise InvalidRequest(f"{path}.{key} is not a string", f"{path}.{key}")
    return names


def _other_fields(value: Mapping[str, Any]) -> Message:
    """Return the message's name and reasoning, the latter under both keys that templates use."""
    extras = {"name": value["name"]} if isinstance(value.get("name"), str) else {}
    for key in ("reasoning", "reasoning_content"):
        if isinstance(value.get(key), str):
            return extras | {"reasoning": value[key], "reasoning_content": value[key]}
    return extras


def text_of(content: str | list[dict[str, Any]]) -> str:
    """Return the text of a message's content, its parts joined by newlines; images have none."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


def _check_content(value: Any, path: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{path} must be a string or a list of parts", path)
    return [_check_part(item, f"{path}.{index}") for index, item in enumerate(value)]


def _check_part(value: Any, path: str) -> dict[str, Any]:
    part = value if isinstance(value, dict) else {}
    kind, text = part.get("type"), part.get("text")
    if kind == "refusal":  # an assistant's refusal in place of an answer
        kind, text = "text", part.get("refusal")
    if kind == "text" and isinstance(text, str):
        return {"type": "text", "text": text}
    if kind == "image_url":
        return read_image_part(part, path)
    if kind == "image_embeds":
        return read_embeds_part(part, path)
    if isinstance(kind, str) and kind != "text":
        known = "the supported ones are text, image_url and image_embeds"
        raise InvalidRequest(f"{path}: {kind[:40]} parts are not supported; {known}", path)
    raise InvalidRequest(f'{path} must be {{"type": "text", "text": …}}', path)
