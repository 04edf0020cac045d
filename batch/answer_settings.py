"""The settings on which answers depend in addition to the input, such as the model. Pure.

The answers of two runs are mixed only if their settings are equal.
"""

from collections.abc import Mapping
from typing import Any


def difference(recorded: Mapping[str, Any], answer_settings: Mapping[str, Any]) -> str | None:
    """Describe the first difference between a `recorded` run's answer settings and these; None if they are equal."""
    had, has = _text(recorded), _text(answer_settings)
    for name in (*has, *had):
        was, now = had.get(name, "(none)"), has.get(name, "(none)")
        if was != now:
            return f"{name} was {was} and is {now} now"
    return None


def _text(answer_settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in answer_settings.items()}
