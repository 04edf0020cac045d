"""Read `allowed_tools`, a choice that allows some of the tools, in the form of its API. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.tools.choice import ChoiceMode
from scheduler.tools.definitions import TOOLS, Tool, ToolForm
from wire.errors import InvalidRequest


def narrowed_chat(tools: Sequence[Tool], choice: Any) -> tuple[tuple[Tool, ...], Any]:
    """Return the tools that a chat's `allowed_tools` allows, and its mode as the new choice; for other choices, both
    are unchanged.

    Raises InvalidRequest with the path of the field.
    """
    if not tools or not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return tuple(tools), choice
    path, given = "tool_choice.allowed_tools", choice.get("allowed_tools")
    if not isinstance(given, Mapping):
        raise InvalidRequest(f'{path} must be {{"mode": …, "tools": […]}}', path)
    mode, names = allowed_names(given, path, TOOLS)
    return tools_named(names, tools), mode


def allowed_names(given: Mapping[str, Any], path: str, form: ToolForm) -> tuple[ChoiceMode, list[tuple[str, str]]]:
    """Return the mode and, for each allowed tool, the path of its name and the name."""
    mode, allowed = given.get("mode"), given.get("tools")
    if mode not in (ChoiceMode.AUTO, ChoiceMode.REQUIRED):
        raise InvalidRequest(f"{path}.mode must be auto or required", f"{path}.mode")
    if not isinstance(allowed, list) or not allowed:
        raise InvalidRequest(f"{path}.tools must be a list of at least one tool", f"{path}.tools")
    return ChoiceMode(mode), [chosen_name(one, f"{path}.tools.{at}", form) for at, one in enumerate(allowed)]


def chosen_name(given: Any, path: str, form: ToolForm) -> tuple[str, str]:
    """Return the path and the name of a chosen tool."""
    function: Any = given if isinstance(given, Mapping) and given.get("type") == "function" else {}
    field, shown = "name", '"name": …'
    if form.function:
        function = function.get(form.function)
        field, shown = f"{form.function}.name", f'"{form.function}": {{"name": …}}'
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequest(f'{path} must be {{"type": "function", {shown}}}', f"{path}.{field}")
    return f"{path}.{field}", name


def tools_named(names: Sequence[tuple[str, str]], tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Return the tools with these names, in the order of `tools`."""
    known = {tool["function"]["name"] for tool in tools}
    for path, name in names:
        if name not in known:
            raise InvalidRequest(f"{path} is {name[:80]!r}, which none of the tools has", path)
    chosen = {name for _, name in names}
    return tuple(tool for tool in tools if tool["function"]["name"] in chosen)
