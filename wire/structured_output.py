"""Build structured output options from a caller's choices or JSON schema (text, dict or pydantic class)."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from wire.errors import InvalidGrammar
from wire.types import StructuredOutput

OLD_BACKENDS = ("xgrammar", "outlines", "lm-format-enforcer", "guidance")
"""Names of vLLM's other backends; llguidance serves them."""
BACKENDS = ("auto", "llguidance", *OLD_BACKENDS)


def check_backend(name: str, param: str | None = None) -> None:
    """Raise InvalidGrammar, listing the known backends, for an unknown one."""
    if name not in BACKENDS:
        raise InvalidGrammar(f"Unknown guided decoding backend: {name!r}; choose from {', '.join(BACKENDS)}", param)


@runtime_checkable
class HasSchema(Protocol):
    """A pydantic model, or any object that returns its JSON schema in the same way."""

    def model_json_schema(self) -> dict[str, Any]:
        """Return the JSON schema."""
        ...


def json_output(
    schema: str | Mapping[str, Any] | HasSchema | type[HasSchema],
    *,
    whitespace_pattern: str | None = None,
    backend: str = "auto",
) -> StructuredOutput:
    """Return the options for JSON of `schema`: JSON text, a dict, or a class with `model_json_schema`.

    Raises InvalidGrammar for anything else. The schema itself is checked when it is compiled.
    """
    if isinstance(schema, str):
        text = schema
    elif isinstance(schema, Mapping):
        text = _as_json("json", dict(schema))
    elif isinstance(schema, HasSchema):
        text = _as_json("json", schema.model_json_schema())
    else:
        raise InvalidGrammar(f"json is {_name(schema)}, but must be a JSON schema as text, a dict or a pydantic class")
    return StructuredOutput("json", text, whitespace_pattern, backend)


def choice_output(texts: Iterable[str], *, backend: str = "auto") -> StructuredOutput:
    """Return the options for one of `texts`. Raises InvalidGrammar for anything but a list of strings."""
    if isinstance(texts, str | Mapping) or not isinstance(texts, Iterable):
        raise InvalidGrammar(f"choice is {_name(texts)}, but must be a list of strings")
    return StructuredOutput("choice", _as_json("choice", list(texts)), backend=backend)


def _as_json(kind: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidGrammar(f"{kind} cannot be written as JSON: {error}") from error


def _name(value: object) -> str:
    return f"a {type(value).__name__}"
