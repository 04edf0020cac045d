"""--hf-overrides: replace values of a model's config.json; only the dimensions of its vectors can be replaced."""

import json
from collections.abc import Mapping
from typing import Any

from wire.errors import ConfigError

_DIMENSIONS, _ANY = "matryoshka_dimensions", "is_matryoshka"


def checked_overrides(text: str) -> str:
    """Return the text unchanged. Raises ConfigError."""
    with_overrides({}, text)
    return text


def with_overrides(config: Mapping[str, Any], text: str | None) -> Mapping[str, Any]:
    """Return the config with the overrides. Raises ConfigError if one has no effect here."""
    try:
        given = json.loads(text or "{}")
    except ValueError:
        given = None
    if not isinstance(given, dict) or set(given) - {_DIMENSIONS, _ANY}:
        raise ConfigError(
            f"{str(text)[:80]!r} is not a JSON object with {_DIMENSIONS} or {_ANY}: set other values in config.json"
        )
    if _DIMENSIONS in given and not dimensions_of({_DIMENSIONS: given[_DIMENSIONS]}):
        wanted = "a non-empty list of positive integers"
        raise ConfigError(f"{_DIMENSIONS} is {given[_DIMENSIONS]!r:.80}, but must be {wanted}")
    if not isinstance(given.get(_ANY, False), bool):
        raise ConfigError(f"{_ANY} is {given[_ANY]!r:.80}, but must be true or false")
    return {**config, **given}


def dimensions_of(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the numbers of dimensions to which the model's vectors may be cut: empty for any, None if not at all."""
    given = config.get(_DIMENSIONS)
    if isinstance(given, list) and given and all(type(one) is int and one > 0 for one in given):
        return tuple(given)
    return () if config.get(_ANY) is True else None
