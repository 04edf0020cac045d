"""The rows of the KV benchmark: the measure, the peer's figure, and whether the goal is met."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

COLUMNS = ("measure", "ours", "peer", "ratio", "goal", "met")


@dataclass(frozen=True, slots=True)
class Row:
    """One line. `ours` and `peer` are in `unit`; a goal limits the ratio, or `ours` if there is no peer.

    `at_least`: the goal is a minimum, else a maximum. A skipped row has the reason and no figures.
    """

    measure: str
    unit: str = "GB/s"
    ours: float | None = None
    peer_name: str = ""
    peer: float | None = None
    ratio: float | None = None
    goal: float | None = None
    at_least: bool = True
    skipped: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        value = self.ours if self.peer_name == "" else self.ratio
        if self.goal is None or value is None:
            return None
        return value >= self.goal if self.at_least else value <= self.goal

    def cells(self) -> tuple[str, ...]:
        """Return the texts of the columns."""
        if self.skipped:
            return (self.measure, "-", self.peer_name, "-", "-", f"not measured: {self.skipped}")
        goal = "" if self.goal is None else f"{'>=' if self.at_least else '<='} {self.goal:g}"
        if self.goal is not None and self.peer_name == "":
            goal += f" {self.unit}"
        met = {None: "", True: "yes", False: "no"}[self.met]
        peer = self.peer_name if self.peer is None else f"{self.peer_name} {self.peer:.3g} {self.unit}"
        ours = "" if self.ours is None else f"{self.ours:.3g} {self.unit}"
        return (self.measure, ours, peer, "" if self.ratio is None else f"{self.ratio:.2f}", goal, met)


def markdown(rows: list[Row]) -> str:
    """Return the table, its columns padded."""
    lines = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    lines.insert(1, tuple("-" * width for width in widths))
    padded = (" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(f"| {line} |" for line in padded)


def document(rows: list[Row], **about: Any) -> dict[str, Any]:
    """Return all rows as one JSON document."""
    return {**about, "rows": [{**asdict(row), "met": row.met} for row in rows]}


def cpu() -> str:
    """Return the CPU's name, model number and how many cores this process may use."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or fields.get("CPU part", "unknown")
    number = f" (model {fields['model']})" if "model" in fields else ""
    return f"{name}{number}, {len(os.sched_getaffinity(0))} cores"
