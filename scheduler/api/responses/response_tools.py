"""Read `tools` and `tool_choice` of /v1/responses, and format them as the answer repeats them. Pure."""

from collections.abc import Mapping
from typing import Any

from scheduler.tools.allowed import allowed_names, chosen_name, tools_named
from scheduler.tools.choice import ChoiceMode, ToolChoice
from scheduler.tools.definitions import Tool, ToolForm, tools_in
from wire.errors import InvalidRequest

_FORM = ToolForm("tools", "", "parameters", "function")
_SHOWN = dict.fromkeys(("name", "description", "parameters", "strict"))
_MODES = (ChoiceMode.NONE, ChoiceMode.AUTO, ChoiceMode.REQUIRED)


def read_response_tools(
    tools: Any, choice: Any, *, parallel: bool | None, parser: str | None
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tools that the template describes, and which of them the answer may call; auto needs a `parser`.

    Tools that are not among the `allowed_tools` are left out. Raises InvalidRequest with the path of the field.
    """
    read = tools_in(_FORM, tools or None)
    mode, names, path = _mode_and_names(choice)
    if not read:
        if mode in (ChoiceMode.REQUIRED, ChoiceMode.NAMED) or names is not None:
            raise InvalidRequest("tool_choice needs tools", "tool_choice")
        return (), ToolChoice(ChoiceMode.NONE)
    allowed = read if names is None else tools_named(names, read)
    field = _FORM.path_of(allowed, read)
    if mode is ChoiceMode.NAMED:
        return read, ToolChoice(mode, allowed, field, parallel=False)
    if mode is ChoiceMode.AUTO and parser is None:
        raise InvalidRequest(
            f"{path} auto (the default) needs the format of the model's calls, but its chat template shows no "
            "known format: name one with --tool-call-parser, use none, or force a call by required or a tool's name",
            path,
        )
    return allowed, ToolChoice(mode, allowed, field, parallel=parallel is not False)


def shown_tools(tools: Any) -> list[dict[str, Any]]:
    """Return checked `tools` with the fields that clients expect to find."""
    return [{"type": "function"} | {name: tool.get(name) for name in _SHOWN} for tool in tools or ()]


def _mode_and_names(given: Any) -> tuple[ChoiceMode, list[tuple[str, str]] | None, str]:
    """Return the mode, the paths and names of the tools that it allows (None: all), and the path of the mode."""
    if given is None:
        return ChoiceMode.AUTO, None, "tool_choice"
    if isinstance(given, str) and given in _MODES:
        return ChoiceMode(given), None, "tool_choice"
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "function":
        return ChoiceMode.NAMED, [chosen_name(given, "tool_choice", _FORM)], "tool_choice"
    if kind != "allowed_tools":
        raise InvalidRequest(
            f'tool_choice must be {", ".join(_MODES)}, {{"type": "function", "name": …}} or {{"type": "allowed_tools", '
            '"mode": …, "tools": […]}',
            "tool_choice" if kind is None else "tool_choice.type",
        )
    mode, names = allowed_names(given, "tool_choice", _FORM)
    return mode, names, "tool_choice.mode"
