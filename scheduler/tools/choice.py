"""Read `tool_choice`, and `function_call`, its legacy form: whether and which tools the answer calls. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from scheduler.tools.definitions import FUNCTIONS, TOOLS, Tool
from wire.errors import InvalidRequest


class ChoiceMode(StrEnum):
    """Who chooses calls: nobody; the model; the model, for at least one call; or the client, which names one tool."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`tools` are those that may be called: the named one, or all of the request.

    The grammar of a forced call is made from the field at path `field`. `parallel`: one answer may have several calls.
    `legacy`: the answer has a `function_call`, not `tool_calls`.
    """

    mode: ChoiceMode
    tools: tuple[Tool, ...] = ()
    field: str = "tools"
    parallel: bool = True
    legacy: bool = False


def read_choice(
    tools: Sequence[Tool], tool_choice: Any, function_call: Any, *, parallel: bool | None, legacy: bool
) -> ToolChoice:
    """Return the choice; `legacy`: the tools came as `functions`. Raises InvalidRequest with the path of the field."""
    field, other = ("function_call", "tool_choice") if legacy else ("tool_choice", "function_call")
    given, misplaced = (function_call, tool_choice) if legacy else (tool_choice, function_call)
    if misplaced is not None and misplaced != "none":
        raise InvalidRequest(f"{other} belongs to {'tools' if legacy else 'functions'}: use {field}", other)
    if not tools:
        if given is not None and given != "none":
            raise InvalidRequest(f"{field} needs {'functions' if legacy else 'tools'}", field)
        return ToolChoice(ChoiceMode.NONE)
    form, several = FUNCTIONS if legacy else TOOLS, parallel is not False and not legacy
    if given is None:
        return ToolChoice(ChoiceMode.AUTO, tuple(tools), form.field, several, legacy)
    modes = [ChoiceMode.NONE, ChoiceMode.AUTO, *([] if legacy else [ChoiceMode.REQUIRED])]
    if isinstance(given, str) and given in modes:
        return ToolChoice(ChoiceMode(given), tuple(tools), form.path_of(tools, tools), several, legacy)
    name, path = _chosen_name(given, field, modes)
    at = next((at for at, tool in enumerate(tools) if tool["function"]["name"] == name), None)
    if at is None:
        raise InvalidRequest(f"{path} is {name[:80]!r}, which none of the tools has", path)
    return ToolChoice(ChoiceMode.NAMED, (tools[at],), form.schema_path(at), parallel=False, legacy=legacy)


def _chosen_name(given: Any, field: str, modes: Sequence[str]) -> tuple[str, str]:
    """Return the name that a choice has, and its path."""
    form = '{"name": …}' if field == "function_call" else '{"type": "function", "function": {"name": …}}'
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{field} must be {', '.join(modes)} or {form}", field)
    path, function = (field, given) if field == "function_call" else (f"{field}.function", given.get("function"))
    if field == "tool_choice" and given.get("type", "function") != "function":
        raise InvalidRequest(f"{field}.type must be function or allowed_tools", f"{field}.type")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequest(f"{path}.name is not a string: {field} must be {form}", f"{path}.name")
    return name, f"{path}.name"
