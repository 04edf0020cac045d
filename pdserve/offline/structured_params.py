"""Structured outputs: the fields of vLLM's StructuredOutputsParams, and of its older GuidedDecodingParams."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from json import loads
from typing import Any

from pdserve.offline.user_errors import hide_internal_frames

_COMPILERS = ("backend", "disable_fallback")
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(slots=True)
class StructuredOutputsParams:
    """Exactly one of KINDS, and the white space allowed in JSON. Raises ValueError for none or several.

    `disable_additional_properties`: objects have only the properties that the JSON schema names, unless it sets
    `additionalProperties` for them.
    `backend` and `disable_fallback` choose vLLM's grammar compiler and have no effect.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    backend: str | None = None
    disable_fallback: bool = False

    @hide_internal_frames
    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"structured outputs have {len(given)} of {', '.join(KINDS)}: use exactly one")

    def body(self) -> dict[str, Any]:
        """Return the value of the field `structured_outputs` of a request."""
        values = {
            field.name: value for field in fields(self) if (value := getattr(self, field.name)) not in (None, False)
        }
        values = {name: value for name, value in values.items() if name not in _COMPILERS}
        if values.pop("disable_additional_properties", False) and self.json is not None:
            values["json"] = _without_extra_properties(_read_schema(self.json))
        return values


@dataclass(slots=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """The older name of StructuredOutputsParams."""


def structured_body(given: StructuredOutputsParams | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the value of a request's `structured_outputs`. Raises ValueError."""
    if isinstance(given, Mapping):
        given = StructuredOutputsParams(**given)
    return None if given is None else given.body()


def _read_schema(given: str | dict[str, Any]) -> Any:
    """Parse a schema given as text. Raises ValueError for invalid JSON."""
    return loads(given) if isinstance(given, str) else given


def _without_extra_properties(schema: Any) -> Any:
    """Set `additionalProperties` to false in all objects of a schema that do not set it."""
    if isinstance(schema, list):
        return [_without_extra_properties(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _without_extra_properties(value) for name, value in schema.items()}
    has_names = "properties" in schema or "patternProperties" in schema
    return {"additionalProperties": False, **closed} if has_names else closed
