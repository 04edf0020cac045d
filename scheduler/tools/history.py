"""Read tool calls and their results in a conversation into the form that chat templates expect. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from wire.errors import InvalidRequest

_MAX_LEVELS = 200
"""Deepest nesting of arguments: the process that renders templates cannot read or write many more levels."""
TOOL_ROLES = ("tool", "function")
"""The role of a call's result, and its legacy name."""


def read_calls(message: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """Return the assistant's calls, with arguments as objects; `function_call`, the legacy form, is one without an id.

    As in vLLM, arguments that are not a JSON object become {}, and so do those nested too deep: they were written by a
    model, and refusing them would end the conversation. Raises InvalidRequest with the path of a field.
    """
    legacy = message.get("function_call")
    if legacy is not None:
        return [{"type": "function", "function": _function(legacy, f"{path}.function_call")}]
    calls = message.get("tool_calls")
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise InvalidRequest(f"{path}.tool_calls is not a list", f"{path}.tool_calls")
    return [_call(one, f"{path}.tool_calls.{at}") for at, one in enumerate(calls)]


def check_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidRequest for a result that follows no call of the assistant, or whose id no call before it has."""
    calls: list[Mapping[str, Any]] = []
    for at, message in enumerate(messages):
        if message["role"] != "tool":
            calls = message.get("tool_calls", [])
            continue
        if not calls:
            raise InvalidRequest(
                f"messages.{at}: a message with role tool must follow an assistant's message with tool_calls",
                f"messages.{at}.role",
            )
        called, known = message.get("tool_call_id"), {call.get("id") for call in calls}
        if called is not None and called not in known and None not in known:
            raise InvalidRequest(
                f"messages.{at}.tool_call_id is {called[:80]!r}, but no call before it has this id",
                f"messages.{at}.tool_call_id",
            )


def _call(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} is not an object", path)
    if value.get("type", "function") != "function":
        raise InvalidRequest(f'{path}.type must be "function"', f"{path}.type")
    call_id = value.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise InvalidRequest(f"{path}.id is not a string", f"{path}.id")
    named = {} if call_id is None else {"id": call_id}
    return named | {"type": "function", "function": _function(value.get("function"), f"{path}.function")}


def _function(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} is not an object", path)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{path}.name must be a non-empty string", f"{path}.name")
    return {"name": name, "arguments": read_arguments(value.get("arguments"))}


def read_arguments(value: Any) -> dict[str, Any]:
    """Return a call's arguments as an object, {} if they are not one."""
    if isinstance(value, str):
        try:
            orjson.loads(value)  # stricter: it refuses NaN and lone surrogates, but rounds integers beyond 64 bits
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, dict) and not _is_deeper(value, _MAX_LEVELS) else {}


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether objects and lists are nested in more levels."""
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(one, levels - 1) for one in inner)
