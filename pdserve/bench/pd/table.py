"""The outcomes as a table and as JSON."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from pdserve.bench.pd.outcome import FIGURES, BenchOutcome
from pdserve.bench.pd.verdict import where, why, winner
from pdserve.text_table import text_table


def lines(outcomes: Sequence[BenchOutcome]) -> Iterator[str]:
    """Yield a row for each load and figure with a column per contestant and the best one, then winners and reasons."""
    contestants = list(dict.fromkeys(one.contestant for one in outcomes))
    yield from text_table(("load", "figure", *contestants, "best"), list(_rows(outcomes, contestants)))
    yield ""
    yield from where(outcomes)
    yield ""
    yield from why(outcomes)
    for one in outcomes:
        if one.failed:
            requests = "request" if one.failed == 1 else "requests"
            yield f"not compared: {one.failed} {requests} failed in {one.load}, {one.contestant}: {one.failure}"


def as_json(outcomes: Sequence[BenchOutcome]) -> list[dict[str, Any]]:
    """Return an object for each outcome, with its figures and names."""
    return [
        {
            "load": one.load, "contestant": one.contestant, **one.figures, "failed": one.failed,
            "failure": one.failure, "use": None if one.use is None else dataclasses.asdict(one.use),
            "client_cpu_share": one.client_share,
        }
        for one in outcomes
    ]  # fmt: skip


def _rows(outcomes: Sequence[BenchOutcome], contestants: Sequence[str]) -> Iterator[list[str]]:
    for load in dict.fromkeys(one.load for one in outcomes):
        here = {one.contestant: one for one in outcomes if one.load == load}
        for place, figure in enumerate(FIGURES):
            cells = [_cell(here.get(name), figure.key) for name in contestants]
            best = winner(figure, list(here.values()))
            unit = "" if figure.more_is_better else ", ms"
            best_text = "even" if best is None else f"{best[0]}, {best[1]:.2f}x"
            yield ["" if place else load, figure.title + unit, *cells, best_text]


def _cell(one: BenchOutcome | None, key: str) -> str:
    if one is None:
        return "-"
    return f"{one.figures[key]:.1f}" if not one.failed else "failed"
