"""What answers depend on beside their lines, by name, as the model: two runs' answers go together where it is the same.

Pure.
"""

from collections.abc import Mapping
from typing import Any


def difference(told: Mapping[str, Any], binding: Mapping[str, Any]) -> str | None:
    """Return in words the first thing that parts a run that was `told` from one that is bound now; None for nothing."""
    had, has = _text(told), _text(binding)
    for name in (*has, *had):
        was, now = had.get(name, "(none)"), has.get(name, "(none)")
        if was != now:
            return f"{name} was {was} and is {now} now"
    return None


def _text(told: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in told.items()}
