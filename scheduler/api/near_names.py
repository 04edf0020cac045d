"""Find the known name that an unknown one was probably meant to be. Pure."""

from collections.abc import Iterable

MAX_DISTANCE = 2
_MIN_PREFIX = 3  # characters; shorter prefixes match too many names


def near_name(name: str, known: Iterable[str]) -> str | None:
    """Return the nearest known name: at most two edits away (fewer if `name` is short), or starting with `name`."""
    found = [(distance, other) for other in known if (distance := _distance(name, other)) is not None]
    return min(found)[1] if found else None


def _distance(name: str, other: str) -> int | None:
    """Return the number of edits between two near names, else None; a prefix counts as one edit more than the limit."""
    if abs(len(name) - len(other)) <= MAX_DISTANCE:
        edits = edit_distance(name, other)
        if 0 < edits <= MAX_DISTANCE and 2 * edits <= len(name):
            return edits
    return MAX_DISTANCE + 1 if len(name) >= _MIN_PREFIX and other.startswith(name) and other != name else None


def edit_distance(one: str, other: str) -> int:
    """Return how many insertions, deletions and substitutions turn `one` into `other` (Levenshtein)."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        last, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (a != b))
    return row[-1]
