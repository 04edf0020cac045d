"""The figures of the GPU benchmark, each with its limit, and their table."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of the engine `who`: `value` and its best possible value `limit`, both in `unit`.

    `goal` is a fraction of the limit.
    """

    measure: str
    who: str
    value: float | None = None
    unit: str = ""
    limit: float | None = None
    limit_name: str = ""
    goal: float | None = None
    note: str = ""

    @property
    def fraction(self) -> float | None:
        """The fraction of the limit that was reached."""
        return None if self.value is None or not self.limit else self.value / self.limit

    @property
    def met(self) -> bool | None:
        """Whether the goal was reached; None without a goal."""
        return None if self.goal is None or self.fraction is None else self.fraction >= self.goal

    def document(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {**asdict(self), "fraction": self.fraction, "met": self.met}

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table."""
        value = "" if self.value is None else f"{self.value:,.4g} {self.unit}"
        limit = "" if not self.limit else f"{self.limit:,.4g} {self.unit}, {self.limit_name}"
        fraction = "" if self.fraction is None else f"{self.fraction:.0%}"
        goal = "" if self.goal is None else f"{self.goal:.0%}"
        met = {None: "", True: "yes", False: "no"}[self.met]
        return self.measure, self.who, value, limit, fraction, goal, met, self.note


HEAD = ("measure", "who", "figure", "limit", "of limit", "goal", "met", "note")


def markdown(rows: Sequence[Row]) -> str:
    """Return the table."""
    lines = [HEAD, ("---",) * len(HEAD), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def seconds_of(run: Callable[[], object], wait: Callable[[], object], rounds: int, *, warm_ups: int = 2) -> float:
    """Return the median seconds of a call whose work is complete when `wait` returns."""
    times = []
    for number in range(warm_ups + rounds):
        wait()
        began = perf_counter()
        run()
        wait()
        if number >= warm_ups:
            times.append(perf_counter() - began)
    return median(times)
