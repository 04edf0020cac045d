"""What an output must be: the fields of vLLM's StructuredOutputsParams, and of GuidedDecodingParams before it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from json import loads
from typing import Any

from pdserve.offline.user_errors import plainly

_COMPILERS = ("backend", "disable_fallback")
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(slots=True)
class StructuredOutputsParams:
    """Exactly one of KINDS, and how white space may stand in JSON. Raises ValueError for none or several.

    `disable_additional_properties`: objects of a JSON schema that do not say otherwise have no others than it names.
    `backend` and `disable_fallback` choose a compiler of vLLM's, and have no effect: the engine chooses its own.
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

    @plainly
    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"structured outputs have {len(given)} of {', '.join(KINDS)}: give exactly one")

    def body(self) -> dict[str, Any]:
        """Return the value of the field `structured_outputs` of a request."""
        told = {
            field.name: value for field in fields(self) if (value := getattr(self, field.name)) not in (None, False)
        }
        told = {name: value for name, value in told.items() if name not in _COMPILERS}
        if told.pop("disable_additional_properties", False) and self.json is not None:
            told["json"] = _closed(_read_schema(self.json))
        return told


@dataclass(slots=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """The older name of the same."""


def structured_body(given: StructuredOutputsParams | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the value of a request's `structured_outputs`. Raises ValueError."""
    if isinstance(given, Mapping):
        given = StructuredOutputsParams(**given)
    return None if given is None else given.body()


def _read_schema(given: str | dict[str, Any]) -> Any:
    """Return a schema as an object. Raises ValueError for a text that is no JSON."""
    return loads(given) if isinstance(given, str) else given


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have no properties but those that it names, where they do not say otherwise."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    has_names = "properties" in schema or "patternProperties" in schema
    return {"additionalProperties": False, **closed} if has_names else closed
