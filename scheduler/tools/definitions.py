"""Read a body's tools, in the form of its API, as chat templates expect them. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.tools.argument_schema import check_schema
from wire.errors import InvalidRequest

MAX_TOOLS = 128
"""As many as OpenAI's API accepts."""
Tool = Mapping[str, Any]
_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class ToolForm:
    """The form of tools in one API: the body's field, and within a tool the paths of its function and its schema.

    `kind` is the only type that tools may have, None if they have none. With `needs_schema` each has a schema.
    """

    field: str
    function: str
    schema: str
    kind: str | None
    max_name_chars: int = 64
    needs_schema: bool = False

    def path(self, at: int) -> str:
        """Return the path of the function of tool number `at`."""
        return f"{self.field}.{at}.{self.function}" if self.function else f"{self.field}.{at}"

    def schema_path(self, at: int) -> str:
        """Return the path of the schema of tool number `at`."""
        return f"{self.path(at)}.{self.schema}"

    def path_of(self, chosen: "Sequence[Tool]", tools: "Sequence[Tool]") -> str:
        """Return the path of the field that a forced choice comes from: the only tool's schema, or all tools."""
        return self.schema_path(tools.index(chosen[0])) if len(chosen) == 1 else self.field


TOOLS = ToolForm("tools", "function", "parameters", "function")
FUNCTIONS = ToolForm("functions", "", "parameters", None)
"""The legacy form of TOOLS."""


def read_tools(tools: Any, functions: Any) -> tuple[Tool, ...]:
    """Return the tools of a body, none if it has neither field. Raises InvalidRequest with the path of the field."""
    if tools is not None and functions is not None:
        raise InvalidRequest("functions is the legacy form of tools: use one of them", "functions")
    return tools_in(TOOLS, tools) if functions is None else tools_in(FUNCTIONS, functions)


def tools_in(form: ToolForm, given: Any) -> tuple[Tool, ...]:
    """Return the tools of a field in this form, none for None. Raises InvalidRequest with the path of the field."""
    field = form.field
    if given is None:
        return ()
    if not isinstance(given, list) or not given:
        raise InvalidRequest(f"{field} must be a list of at least one tool, or be left out", field)
    if len(given) > MAX_TOOLS:
        raise InvalidRequest(f"{field} has {len(given)} entries, but the limit is {MAX_TOOLS}", field)
    read = tuple(_tool(one, at, form) for at, one in enumerate(given))
    _check_names(form, [tool["function"]["name"] for tool in read])
    return read


def schemas_by_name(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """Return the schema of each tool's arguments by the tool's name."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def _tool(value: Any, at: int, form: ToolForm) -> Tool:
    path = f"{form.field}.{at}"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} is not an object", path)
    if form.kind is not None and (kind := value.get("type")) not in (None, form.kind):
        raise InvalidRequest(f"{path}.type is {str(kind)[:40]!r}; only {form.kind} is supported", f"{path}.type")
    function = value.get(form.function) if form.function else value
    return {"type": "function", "function": _function(function, form.path(at), form)}


def _function(value: Any, path: str, form: ToolForm) -> dict[str, Any]:
    """Return the fields that templates see, null if not given, as vLLM passes them."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} is not an object", path)
    name, about, schema, strict = (value.get(key) for key in ("name", "description", form.schema, "strict"))
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > form.max_name_chars:
        shown = repr(name)[:80] if isinstance(name, str) else "missing or not a string"
        raise InvalidRequest(
            f"{path}.name is {shown}; it must have 1 to {form.max_name_chars} of the characters a-z, A-Z, 0-9, _ and -",
            f"{path}.name",
        )
    if about is not None and not isinstance(about, str):
        raise InvalidRequest(f"{path}.description is not a string", f"{path}.description")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{path}.strict is neither true nor false", f"{path}.strict")
    if schema is not None or form.needs_schema:
        check_schema(schema, f"{path}.{form.schema}")
    fields = {"name": name, "description": about, "parameters": schema}
    return fields if strict is None else fields | {"strict": strict}


def _check_names(form: ToolForm, names: list[str]) -> None:
    seen = set[str]()
    for at, name in enumerate(names):
        if name in seen:
            raise InvalidRequest(f"{form.field} has two functions named {name!r}", f"{form.path(at)}.name")
        seen.add(name)
