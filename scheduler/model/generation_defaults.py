"""Defaults of sampling fields: the deployment guide's table, or the model's own generation_config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wire.errors import ConfigError
from wire.types import PARAMETERS

_FILE = "generation_config.json"


GUIDE_DEFAULTS: Mapping[str, Any] = {name: rule.default for name, rule in PARAMETERS.items() if rule.model_sets}
"""The guide's table: values of parameters that a request omits. It lacks max_tokens: each route has its own default."""
_NAMES = {name: name for name in GUIDE_DEFAULTS} | {"max_new_tokens": "max_tokens"}
"""The parameters by their keys in the file."""


def read_defaults(model_folder: str, source: str, override: str | None) -> Mapping[str, Any]:
    """Return the defaults of `source`: vllm or none (the guide's table), auto (the model's own), or a folder.

    `override` is JSON whose values take precedence. Raises ConfigError naming file or flag, value and limit.
    """
    found = dict(GUIDE_DEFAULTS)
    if source not in ("vllm", "none"):
        path = Path(model_folder if source == "auto" else source) / _FILE
        found |= _known_defaults(_read(path, required=source != "auto"), str(path))
    if override:
        found |= _known_defaults(_parse(override, "--override-generation-config"), "--override-generation-config")
    return found


def _read(path: Path, *, required: bool) -> Mapping[str, Any]:
    try:
        return _parse(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        if required:
            raise ConfigError(f"--generation-config: {path} is missing") from None
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _parse(text: str, name: str) -> Mapping[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{name} contains a value of type {type(given).__name__}, not an object")
    return given


def _known_defaults(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the values by their parameters' names, without null and unknown keys."""
    values = {key: value for key, value in given.items() if key in _NAMES and value is not None}
    for key, value in values.items():
        rule = PARAMETERS[_NAMES[key]]
        bounds, whole = rule.client, rule.kind is not float
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ConfigError(f"{name}: {key} is {value!r}, but must be {'a whole number ' if whole else ''}{bounds}")
        if not bounds.allow(value):
            raise ConfigError(f"{name}: {key} is {value}, but must be {bounds}")
    return {_NAMES[key]: value for key, value in values.items()}
