"""A chat's tools: what the answer may call, how its text becomes calls, and calls in OpenAI's format."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from scheduler.api.generation_body import ChatBody
from scheduler.api.structured import Constraint
from scheduler.tools.allowed import narrowed_chat
from scheduler.tools.call_options import CallOptions, call_origin
from scheduler.tools.call_reader import StepParser
from scheduler.tools.choice import ChoiceMode, ToolChoice, read_choice
from scheduler.tools.definitions import Tool, read_tools, schemas_by_name
from scheduler.tools.deltas import CallDelta
from scheduler.tools.forced import NamedCall, forced_schema, required_calls
from scheduler.tools.parsers.registry import CALL_FORMATS
from wire.errors import InvalidRequest
from wire.structured_output import json_output


def tools_of_chat(body: ChatBody, parser: str | None) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tools that the template describes, and which of them the answer may or must call; auto needs a parser.

    Tools that are not among the `allowed_tools` are left out. Raises InvalidRequest with the path of the field.
    """
    tools, legacy = read_tools(body.tools, body.functions), body.functions is not None
    tools, given = (tools, body.tool_choice) if legacy else narrowed_chat(tools, body.tool_choice)
    choice = read_choice(tools, given, body.function_call, parallel=body.parallel_tool_calls, legacy=legacy)
    if choice.mode is ChoiceMode.AUTO and parser is None:
        field = "function_call" if choice.legacy else "tool_choice"
        raise InvalidRequest(
            f"{field} auto (the default) needs the format of the model's calls, but its chat template shows no "
            "known format: name one with --tool-call-parser, use none, or force a call by "
            f"{'' if choice.legacy else 'required or '}a function's name",
            field,
        )
    return tools, choice


def forced_constraint(choice: ToolChoice) -> Constraint | None:
    """Return the constraint of an answer that must be calls, and the field it comes from."""
    if choice.mode in (ChoiceMode.NONE, ChoiceMode.AUTO):
        return None
    return choice.field, json_output(forced_schema(choice))


def call_options(
    choice: ToolChoice, parser: str | None, request_id: str, prompt: tuple[int, ...]
) -> CallOptions | None:  # fmt: skip
    """Return how the text of an answer becomes content and calls, None if all of it is content.

    OpenAI's named calls finish with `stop`.
    """
    call_format = None if parser is None else CALL_FORMATS[parser]
    if choice.mode is ChoiceMode.NONE and (call_format is None or not call_format.frames_content):
        return None
    origin, max_calls = call_origin(request_id, prompt), None if choice.parallel else 1
    short_ids = call_format is not None and call_format.short_ids
    if choice.mode is ChoiceMode.REQUIRED:
        return CallOptions(required_calls, origin, max_calls=max_calls, forced=True, short_ids=short_ids)
    if choice.mode is ChoiceMode.NAMED:
        name = choice.tools[0]["function"]["name"]
        return CallOptions(lambda: NamedCall(name), origin, finish_reason=None, forced=True, short_ids=short_ids)
    if call_format is None:
        return None
    return CallOptions(
        partial(StepParser, call_format.steps, schemas_by_name(choice.tools)), origin,
        "function_call" if choice.legacy else "tool_calls",
        max_calls=0 if choice.mode is ChoiceMode.NONE else max_calls, markers=call_format.markers, short_ids=short_ids,
    )  # fmt: skip


def calls_in_delta(calls: Sequence[CallDelta], *, legacy: bool) -> dict[str, Any]:
    """Return the fields of a stream's delta: id, type and name are in the first delta of each call."""
    if legacy:
        return {"function_call": _function(calls[0])}
    return {"tool_calls": [{"index": call.index} | _call(call) for call in calls]}


def calls_in_message(calls: Sequence[CallDelta], *, legacy: bool) -> dict[str, Any]:
    """Return the fields of a complete message."""
    if legacy:
        return {"function_call": _function(calls[0])}
    return {"tool_calls": [_call(call) for call in calls]}


def _call(call: CallDelta) -> dict[str, Any]:
    named = {} if call.name is None else {"id": call.call_id, "type": "function"}
    return named | {"function": _function(call)}


def _function(call: CallDelta) -> dict[str, Any]:
    return ({} if call.name is None else {"name": call.name}) | {"arguments": call.arguments}
