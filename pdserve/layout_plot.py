"""Plot the tokens per second of layouts against their longest gaps: which throughput costs which gap."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pdserve.simulate import Row

CURVE, LIMIT = "#c0392b", "#888888"


def pareto(rows: Sequence["Row"]) -> list["Row"]:
    """Return the rows with more tokens per second than all rows with shorter gaps, the shortest gaps first."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.longest_gap_p99_ms, -row.tokens_per_s)):
        if not found or row.tokens_per_s > found[-1].tokens_per_s:
            found.append(row)
    return found


def draw(rows: Sequence["Row"], *, gap_limit_ms: float, title: str) -> "Figure":
    """Return the plot: for each layout a point at each gap limit, and the Pareto curve through the best of them all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, parse_math=False)
    for name in dict.fromkeys(row.layout for row in rows):
        points = sorted((row.longest_gap_p99_ms, row.tokens_per_s) for row in rows if row.layout == name)
        axes.plot(*zip(*points, strict=True), marker="o", linewidth=0.8, alpha=0.7, label=name)
    best = pareto(rows)
    gaps, rates = [row.longest_gap_p99_ms for row in best], [row.tokens_per_s for row in best]
    axes.plot(gaps, rates, color=CURVE, linewidth=2, drawstyle="steps-post", label="Pareto curve")
    axes.axvline(gap_limit_ms, color=LIMIT, linestyle=":", label="--gap-limit")
    axes.set(xlabel="longest gap p99, milliseconds", ylabel="output tokens per second")
    axes.grid(color="#dddddd")
    axes.legend(loc="lower right")
    return figure
