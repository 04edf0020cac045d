"""Defaults of sampling fields: the guide's table, or the model's own generation_config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from wire.errors import ConfigError
from wire.types import PARAMETERS

_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Values of fields that a request omits. `max_new_tokens` None: each route has its own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None


def read_defaults(model_folder: str, source: str, override: str | None) -> GenerationDefaults:
    """Return the defaults of `source`: vllm or none (the guide's table), auto (the model's own), or a folder.

    `override` is JSON whose values take precedence. Raises ConfigError naming file or flag, value and limit.
    """
    found = GenerationDefaults()
    if source not in ("vllm", "none"):
        path = Path(model_folder if source == "auto" else source) / _FILE
        found = _with(found, _read(path, required=source != "auto"), str(path))
    if override:
        found = _with(found, _parse(override, "--override-generation-config"), "--override-generation-config")
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
        raise ConfigError(f"{name} contains a {type(given).__name__}, not an object")
    return given


def _with(defaults: GenerationDefaults, given: Mapping[str, Any], name: str) -> GenerationDefaults:
    kinds = {field.name: field.type for field in fields(GenerationDefaults)}
    values = {key: value for key, value in given.items() if key in kinds and value is not None}
    for key, value in values.items():
        bounds = PARAMETERS[key.replace("max_new_tokens", "max_tokens")].client
        whole = kinds[key] is not float
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ConfigError(f"{name}: {key} is {value!r}, must be {'a whole number ' if whole else ''}{bounds}")
        if not bounds.allow(value):
            raise ConfigError(f"{name}: {key} is {value}, must be {bounds}")
    return replace(defaults, **values)
