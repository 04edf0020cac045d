"""Plot a load with matplotlib: each request's waiting and streaming time, tokens per second, and the latencies."""

import importlib.util
import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdserve.bench.load.summary import times_s
from pdserve.bench.load.timeline import Timeline
from wire.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WAITS, STREAMS, FAILS = "#c9ced6", "#2f6fb3", "#c0392b"
BINS = 60
_CURVES = (("ttft", "#2f6fb3"), ("tpot", "#2e8b57"), ("longest_gap", "#c0692b"), ("e2el", "#7a4fa3"))
_MAX_BARS = 400


def require_plot(name: str) -> None:
    """Raise ConfigError if nothing can be plotted to a file of this name."""
    if not name.endswith((".svg", ".png")):
        raise ConfigError(f"--plot {name}: use a file that ends in .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'pdserve[plot]'")


def plot(lines: Sequence[Timeline], *, title: str, file_type: str) -> bytes:
    """Return a file of this type (`svg`, `png`) with the plot."""
    return file_of(draw(lines, title=title), file_type)


def file_of(figure: "Figure", file_type: str) -> bytes:
    """Return a file of this type with the figure."""
    file = io.BytesIO()
    figure.savefig(file, format=file_type, dpi=150)
    return file.getvalue()


def draw(lines: Sequence[Timeline], *, title: str) -> "Figure":
    """Return the plot of all ended requests: bars over time (grey: to the first token), rates, and latencies."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8.2), layout="constrained")
    figure.suptitle(title, parse_math=False)
    bars, rates, shares = figure.subplots(3)
    _draw_bars(bars, lines)
    _draw_rates(rates, lines)
    _draw_shares(shares, lines)
    return figure


def _draw_bars(axes: "Axes", lines: Sequence[Timeline]) -> None:
    axes.set_title("requests: waiting for the first token (grey), streaming (blue), failed (red)")
    began_s, span_s = _time_span(lines)
    shown = sorted(lines[:: max(1, math.ceil(len(lines) / _MAX_BARS))], key=lambda line: line.sent_s)
    firsts_s = [line.pieces_s[0] if line.pieces_s else line.end_s for line in shown]
    sent_s, ends_s = [line.sent_s for line in shown], [line.end_s for line in shown]
    for starts_s, stops_s, colour in ((sent_s, firsts_s, WAITS), (firsts_s, ends_s, STREAMS)):
        widths = [stop_s - start_s for start_s, stop_s in zip(starts_s, stops_s, strict=True)]
        colours = [colour if line.failure is None else FAILS for line in shown]
        axes.barh(
            range(len(shown)), widths, left=[start_s - began_s for start_s in starts_s], height=0.9, color=colours
        )
    axes.set(xlim=(0, span_s), xlabel="seconds", yticks=[])
    axes.invert_yaxis()


def _draw_rates(axes: "Axes", lines: Sequence[Timeline]) -> None:
    began_s, span_s = _time_span(lines)
    pieces_s = [piece_s - began_s for line in lines for piece_s in line.pieces_s]
    rates = [line.output_len / len(line.pieces_s) * BINS / span_s for line in lines for _ in line.pieces_s]
    axes.hist(pieces_s, bins=BINS, range=(0, span_s), weights=rates, color=STREAMS, rwidth=0.9)
    axes.set(title="output tokens per second", xlim=(0, span_s), xlabel="seconds")


def _draw_shares(axes: "Axes", lines: Sequence[Timeline]) -> None:
    whole = [line for line in lines if line.failure is None]
    for name, colour in _CURVES:
        times_ms = [1000 * time_s for line in whole for time_s in times_s(line, name)]
        if times_ms:
            axes.ecdf(times_ms, label=name, color=colour)
            axes.legend()
    axes.set(title="share of requests within this latency", xscale="log", xlabel="milliseconds")
    axes.grid(axis="x", color="#dddddd")


def _time_span(lines: Sequence[Timeline]) -> tuple[float, float]:
    began_s = min((line.sent_s for line in lines), default=0.0)
    return began_s, max(1e-9, max((line.end_s for line in lines), default=1.0) - began_s)
