"""Read deploy/compose.yaml as docker compose does, as far as the file uses it: merges, variables, `$$`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).resolve().parent.parent.parent / "deploy" / "compose.yaml"
# An escaped dollar, or a variable with a default; a value is filled in once and not read again.
_VARIABLE = re.compile(r"\$\$|\$\{([A-Z_]+):-([^${}]*)\}|\$")


def read(environ: Mapping[str, str], text: str | None = None) -> dict[str, Any]:
    """Return the file with its variables filled in. Raises ValueError for one without a default."""
    document = yaml.safe_load(FILE.read_text() if text is None else text)
    filled: dict[str, Any] = _fill(document, environ)
    return filled


def _fill(value: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _fill(member, environ) for key, member in value.items()}
    if isinstance(value, list):
        return [_fill(member, environ) for member in value]
    return _VARIABLE.sub(lambda match: _substitute(match, environ), value) if isinstance(value, str) else value


def _substitute(match: re.Match[str], environ: Mapping[str, str]) -> str:
    if match[0] == "$$":
        return "$"
    if match[1] is None:
        raise ValueError(f"a variable without a default at {match.string[match.start() : match.start() + 30]!r}")
    return environ.get(match[1]) or match[2]
