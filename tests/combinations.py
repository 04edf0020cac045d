"""Which cases of a test with parameters run in `scripts/test`; the others are marked long."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest


def cover(cases: Sequence[Mapping[str, object]], strength: int) -> set[int]:
    """Return the indices of enough cases: any `strength` values that occur together in a case occur in one of these.

    Greedy: the case with the most new combinations comes next, the first of equals.
    """
    combinations = [set(itertools.combinations(case.items(), min(strength, len(case)))) for case in cases]
    chosen: set[int] = set()
    missing = set().union(*combinations)
    while missing:
        best = max(range(len(cases)), key=lambda place: len(combinations[place] & missing))
        chosen.add(best)
        missing -= combinations[best]
    return chosen


def mark_the_rest_long(items: Sequence[pytest.Item]) -> None:
    """Mark cases of tests with `combinations(strength)` as long, except those that cover the rest."""
    groups: dict[tuple[int, object, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("combinations")
        if mark is not None and isinstance(item, pytest.Function) and hasattr(item, "callspec") and _is_run(item):
            groups[mark.args[0], item.parent, item.originalname].append(item)
    for (strength, _, _), group in groups.items():
        chosen = cover([_parameters(item) for item in group], strength)
        for place, item in enumerate(group):
            if place not in chosen:
                item.add_marker(pytest.mark.long)


def mark_the_unnamed_long(items: Sequence[pytest.Item]) -> None:
    """Mark cases of tests with `often(ids)` as long, except those with one of the ids."""
    groups: dict[tuple[object, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("often"):
            groups[item.parent, item.originalname].append(item)
    for group in groups.values():
        mark = group[0].get_closest_marker("often")
        assert mark is not None
        unknown = set(mark.args) - {item.callspec.id for item in group}
        if unknown and len(group) > 1:  # not a case that was requested by its own name
            raise pytest.UsageError(f"{group[0].nodeid}: often names no case by {', '.join(sorted(unknown))}")
        for item in group:
            if item.callspec.id not in mark.args:
                item.add_marker(pytest.mark.long)


def mark_second_loops_long(items: Sequence[pytest.Item]) -> None:
    """Run each test on every event loop, but only its first case on the second; the others are long."""
    first: dict[object, object] = {}
    seen: set[object] = set()
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        test, loop = (item.parent, item.originalname), item.callspec.params.get("anyio_backend")
        if loop != first.setdefault(test, loop):
            if (test, str(loop)) in seen:
                item.add_marker(pytest.mark.long)
            seen.add((test, str(loop)))


def _is_run(item: pytest.Item) -> bool:
    """Return whether the case counts as covering: it is neither skipped here nor long by itself."""
    marks = list(item.iter_markers())
    return not any(mark.name in ("skip", "long") or (mark.name == "skipif" and True in mark.args[:1]) for mark in marks)


def _parameters(item: pytest.Function) -> dict[str, tuple[int, ...]]:
    """Return the identities of the values; names that are set together are one parameter."""
    values = {name: id(value) for name, value in item.callspec.params.items()}
    together = [mark.args[0] for mark in item.iter_markers("parametrize")]
    names = [one.replace(" ", "").split(",") if isinstance(one, str) else one for one in together]
    return {"-".join(some): tuple(values.pop(name) for name in some) for some in names} | {
        name: (value,) for name, value in values.items()
    }
