"""Check a request's structured output option and normalise it. Pure: nothing is compiled here."""

import json
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

from engine.grammar.limits import GrammarLimits
from engine.grammar.schema_objects import check_properties, parts_of
from wire.errors import InvalidGrammar
from wire.structured_output import OLD_BACKENDS, check_backend
from wire.types import StructuredOutput

_JSON_KINDS = ("json", "choice", "structural_tag")


class GrammarKind(StrEnum):
    """The type of a source's text."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A checked option: `text` is a JSON schema, a regex, a JSON list of strings, EBNF or Lark, or a structural tag.

    `whitespace` is the regex allowed between JSON's tokens, None for the backend's default.
    """

    kind: GrammarKind
    text: str
    whitespace: str | None = None

    @property
    def key(self) -> bytes:
        """Digest of all fields: equal sources compile to the same grammar."""
        return sha256(json.dumps([self.kind, self.text, self.whitespace]).encode()).digest()


def read_source(option: StructuredOutput, limits: GrammarLimits) -> GrammarSource:
    """Return the checked option. Raises InvalidGrammar with the value and the limit."""
    text = option.value
    _check_size(option.kind, text, limits)
    _check_size("whitespace_pattern", option.whitespace_pattern or "", limits)
    kind = _grammar_kind(option.kind)
    if option.kind == "json_object":
        text = '{"type":"object"}'
    elif not text.strip():
        raise InvalidGrammar(f"{option.kind} is empty")
    elif kind in _JSON_KINDS:
        text = _read_json(kind, text, limits)
    check_backend(option.backend)
    return GrammarSource(kind, text, option.whitespace_pattern)


def is_old_name(backend: str) -> bool:
    """Return whether `backend` is a legacy name, now served by llguidance."""
    return backend in OLD_BACKENDS


def _grammar_kind(name: str) -> GrammarKind:
    if name == "json_object":
        return GrammarKind.JSON
    try:
        return GrammarKind(name)
    except ValueError as error:
        known = ", ".join([*GrammarKind, "json_object"])
        raise InvalidGrammar(f"{name!r} is not a kind of structured output; the kinds are {known}") from error


def _check_size(name: str, text: str, limits: GrammarLimits) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidGrammar(f"{name} is not valid text: {error}") from error
    if size > limits.source_bytes:
        raise InvalidGrammar(f"{name} has {size} bytes, but the limit is {limits.source_bytes}")


def _read_json(kind: GrammarKind, text: str, limits: GrammarLimits) -> str:
    depth = nesting(text, "[{", "]}")
    if depth > limits.nesting:
        raise InvalidGrammar(f"{kind} is nested {depth} deep, but the limit is {limits.nesting}")
    try:
        value = json.loads(text)
        clean = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        clean.encode()  # half of a surrogate pair cannot be encoded
    except ValueError as error:
        raise InvalidGrammar(f"{kind} is not JSON: {error}") from error
    if kind is GrammarKind.CHOICE:
        _check_choices(value, limits)
    elif not isinstance(value, dict):
        raise InvalidGrammar(f"{kind} is {clean[:40]}, but must be an object")
    elif not value:
        raise InvalidGrammar(f"{kind} is {{}}, which allows anything; use json_object for any object")
    _check_references(value)
    check_properties(value, limits)
    return clean


def _check_references(value: object) -> None:
    """Refuse external references: nothing is fetched."""
    for part in parts_of(value):
        reference = part.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise InvalidGrammar(f"$ref is {reference[:100]!r}, but must be within the schema, such as #/$defs/name")


def _check_choices(value: object, limits: GrammarLimits) -> None:
    if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
        raise InvalidGrammar("choice must be a list of strings")
    if not 1 <= len(value) <= limits.choices:
        raise InvalidGrammar(f"choice has {len(value)} texts, but must have 1 to {limits.choices}")


def nesting(text: str, opening: str, closing: str, quotes: str = '"') -> int:
    """Return how deep brackets are nested in `text`, not counting those between quotes."""
    depth = deepest = 0
    quote, skip = "", False
    for char in text:
        if skip:
            skip = False
        elif char == "\\":
            skip = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in quotes:
            quote = char
        elif char in opening:
            depth += 1
            deepest = max(deepest, depth)
        elif char in closing:
            depth -= 1
    return deepest
