"""Read the output constraint from its three forms: response_format, structured_outputs and guided_*."""

import json
from collections.abc import Mapping
from typing import Any

import orjson

from scheduler.api.generation_body import GenerationBody
from wire.check_prompt import MAX_GRAMMAR_BYTES
from wire.errors import InvalidGrammar, InvalidRequest
from wire.structured_output import check_backend, choice_output, json_output
from wire.types import StructuredOutput

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_GUIDED = ("json", "regex", "choice", "grammar", "json_object")
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
Constraint = tuple[str, StructuredOutput]
"""The name of the field that constrains the output, and the constraint."""


def read_structured(body: GenerationBody, forced: Constraint | None = None) -> Constraint | None:
    """Return the constraining field and the constraint; None for free text. Raises InvalidRequest.

    Calls that are `forced` replace response_format, which is for content, and exclude the other forms. Whether a
    grammar can be compiled is checked later, before anything is computed.
    """
    read = (_from_format(body.response_format), _from_structured_outputs(body.structured_outputs), _from_guided(body))
    constraints = [constraint for constraint in read if constraint is not None]
    if len(constraints) > 1:
        names = [name for name, _ in constraints]
        raise InvalidRequest(f"{' and '.join(names)} each constrain the output: use one", names[0])
    if forced is None:
        return constraints[0] if constraints else None
    if constraints and constraints[0][0] != "response_format":
        raise InvalidRequest(f"{constraints[0][0]} and tool_choice both constrain the output: use one", "tool_choice")
    _check_size(forced[0], forced[1].value)
    return forced


def _from_format(given: Any) -> Constraint | None:
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind not in _FORMATS:
        raise _limit_error(
            "response_format", f"an object whose type is one of {', '.join(_FORMATS)}", given if kind is None else kind
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return "response_format", _json_object(given.get("value"))
    if kind == "structural_tag":
        _check_size("response_format", given)
        return "response_format", StructuredOutput("structural_tag", json.dumps(dict(given), ensure_ascii=False))
    schema = given.get("json_schema")
    if not isinstance(schema, Mapping) or not isinstance(schema.get("schema"), Mapping):
        raise InvalidRequest(
            "response_format.json_schema is missing or has no schema: "
            'write {"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}',
            "response_format.json_schema",
        )
    _check_size("response_format.json_schema", schema["schema"])
    return "response_format", json_output(schema["schema"])


def _json_object(schema: Any) -> StructuredOutput:
    """Return the constraint to any JSON object, or to the schema that huggingface_hub sends as `value`."""
    if schema is None:
        return StructuredOutput("json_object", "")
    return _read_constraint("response_format.value", "json", schema, None, "auto")


def _from_structured_outputs(given: Any) -> Constraint | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise _limit_error("structured_outputs", f"an object with one of {', '.join(_KINDS)}", given)
    kinds = [kind for kind in _KINDS if given.get(kind) is not None and given.get(kind) is not False]
    if len(kinds) != 1:
        raise InvalidRequest(
            f"structured_outputs has {len(kinds)} of {', '.join(_KINDS)}: use exactly one", "structured_outputs"
        )
    whitespace = given.get("whitespace_pattern")
    if given.get("disable_any_whitespace") and whitespace is None:
        whitespace = ""
    if whitespace is not None and not isinstance(whitespace, str):
        raise _limit_error("structured_outputs.whitespace_pattern", "a string", whitespace)
    kind = kinds[0]
    return "structured_outputs", _read_constraint(f"structured_outputs.{kind}", kind, given[kind], whitespace, "auto")


def _from_guided(body: GenerationBody) -> Constraint | None:
    given = {kind: getattr(body, f"guided_{kind}") for kind in _GUIDED}
    kinds = [kind for kind, value in given.items() if value is not None and value is not False]
    if not kinds:
        return None
    if len(kinds) > 1:
        names = " and ".join(f"guided_{kind}" for kind in kinds)
        raise InvalidRequest(f"{names} each constrain the output: use one", f"guided_{kinds[0]}")
    kind = kinds[0]
    backend = (body.guided_decoding_backend or "auto").partition(":")[0]
    check_backend(backend, "guided_decoding_backend")
    return f"guided_{kind}", _read_constraint(
        f"guided_{kind}", kind, given[kind], body.guided_whitespace_pattern, backend
    )


def _read_constraint(name: str, kind: str, value: Any, whitespace: str | None, backend: str) -> StructuredOutput:
    _check_size(name, value)
    if kind == "json_object":
        if value is not True:
            raise _limit_error(name, "true or false", value)
        return StructuredOutput("json_object", "", whitespace, backend)
    if kind == "json":
        if not isinstance(value, str | Mapping):
            raise _limit_error(name, "a JSON schema, as an object or as text", value)
        return json_output(value, whitespace_pattern=whitespace, backend=backend)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise _limit_error(name, "a non-empty list of strings", value)
        return choice_output(value, backend=backend)
    if kind == "structural_tag" and isinstance(value, Mapping):
        value = json.dumps(dict(value), ensure_ascii=False)
    if not isinstance(value, str) or not value:
        raise _limit_error(name, "a non-empty string", value)
    return StructuredOutput(kind, value, whitespace, backend)


def _check_size(name: str, value: Any) -> None:
    """Refuse a constraint over the size limit before it is converted to text."""
    size = len(value) if isinstance(value, str) else len(orjson.dumps(value))
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidGrammar(f"{name} has {size} bytes, but the limit is {MAX_GRAMMAR_BYTES}", name)


def _limit_error(name: str, limit: str, value: Any) -> InvalidRequest:
    shown = repr(value)[:40] if isinstance(value, str | int | float) else f"a {type(value).__name__}"
    return InvalidRequest(f"{name} is {shown}, but must be {limit}", name)
