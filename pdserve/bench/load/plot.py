"""Plot a load: when each request waited and streamed, tokens per second, and the latency distribution."""

import math
from collections.abc import Callable, Iterator, Sequence

from pdserve.bench.load.shapes import Box, Label, Path, Picture, Shape
from pdserve.bench.load.summary import times_s
from pdserve.bench.load.timeline import Timeline

WAITS, STREAMS, FAILS = "#c9ced6", "#2f6fb3", "#c0392b"
_WIDTH, _LEFT, _RIGHT, _HEIGHT, _GAP, _TOP = 900, 70, 50, 200, 56, 50
_SPAN = _WIDTH - _LEFT - _RIGHT
_CURVES = (("ttft", "#2f6fb3"), ("tpot", "#2e8b57"), ("longest_gap", "#c0692b"), ("e2el", "#7a4fa3"))
_MOST_BARS, _TICKS, _BINS = 400, 6, 60


def draw(lines: Sequence[Timeline], *, title: str) -> Picture:
    """Return the plot of all ended requests: bars over time (grey: to the first token), rates, and latencies."""
    panels: list[Callable[[Sequence[Timeline], float], Iterator[Shape]]] = [_bars, _rates, _shares]
    shapes: list[Shape] = [Label(_LEFT, 22, title, size=14)]
    for place, panel in enumerate(panels):
        top = _TOP + place * (_HEIGHT + _GAP)
        shapes += [Box(_LEFT, top, _SPAN, _HEIGHT, border="#888888"), *panel(lines, top)]
    return Picture(_WIDTH, _TOP + len(panels) * (_HEIGHT + _GAP), shapes)


def _bars(lines: Sequence[Timeline], top: float) -> Iterator[Shape]:
    yield Label(_LEFT, top - 6, "requests: waiting for the first token (grey), streaming (blue), failed (red)")
    began_s, span_s = _time_span(lines)
    yield from _seconds_below(top, span_s)
    shown = sorted(lines[:: max(1, math.ceil(len(lines) / _MOST_BARS))], key=lambda line: line.sent_s)
    height = _HEIGHT / max(1, len(shown))
    for row, line in enumerate(shown):
        first_s = line.pieces_s[0] if line.pieces_s else line.end_s
        for start_s, end_s, colour in ((line.sent_s, first_s, WAITS), (first_s, line.end_s, STREAMS)):
            left, width = _SPAN * (start_s - began_s) / span_s, _SPAN * (end_s - start_s) / span_s
            fill = colour if line.failure is None else FAILS
            yield Box(_LEFT + left, top + row * height, max(0.0, width), max(0.3, 0.9 * height), fill)


def _rates(lines: Sequence[Timeline], top: float) -> Iterator[Shape]:
    yield Label(_LEFT, top - 6, "output tokens per second")
    began_s, span_s = _time_span(lines)
    yield from _seconds_below(top, span_s)
    step_s, tokens = span_s / _BINS, [0.0] * _BINS
    for line in lines:
        for piece_s in line.pieces_s:
            tokens[min(_BINS - 1, int((piece_s - began_s) / step_s))] += line.output_len / len(line.pieces_s)
    most = max(tokens) / step_s or 1.0
    yield from _values_left(top, most)
    for place, count in enumerate(tokens):
        height, width = _HEIGHT * count / step_s / most, _SPAN / _BINS
        yield Box(_LEFT + place * width, top + _HEIGHT - height, 0.9 * width, height, STREAMS)


def _shares(lines: Sequence[Timeline], top: float) -> Iterator[Shape]:
    yield Label(_LEFT, top - 6, "share of requests within this latency (milliseconds)")
    whole = [line for line in lines if line.failure is None]
    curves = {name: sorted(1000 * s for line in whole for s in times_s(line, name)) for name, _ in _CURVES}
    positive = [value for values in curves.values() for value in values if value > 0]
    low = math.floor(math.log10(min(positive, default=1.0)))
    high = max(low + 1, math.ceil(math.log10(max(positive, default=10.0))))
    for power in range(low, high + 1):
        x = _LEFT + _SPAN * (power - low) / (high - low)
        yield Path([(x, top), (x, top + _HEIGHT)], "#dddddd")
        yield Label(x, top + _HEIGHT + 16, f"{10.0**power:g} ms", "middle")
    yield from _values_left(top, 1.0)
    for place, (name, colour) in enumerate(_CURVES):
        yield Label(_LEFT + 8, top + 18 + 16 * place, name, colour=colour)
        points = [
            (_LEFT + _SPAN * (math.log10(max(value, 10.0**low)) - low) / (high - low), rank / len(curves[name]))
            for rank, value in enumerate(curves[name], 1)
        ]
        if points:
            steps = [(points[0][0], 0.0), *points]
            yield Path([(x, top + _HEIGHT * (1 - share)) for x, share in steps], colour, 1.5)


def _time_span(lines: Sequence[Timeline]) -> tuple[float, float]:
    began_s = min((line.sent_s for line in lines), default=0.0)
    return began_s, max(1e-9, max((line.end_s for line in lines), default=1.0) - began_s)


def _seconds_below(top: float, span_s: float) -> Iterator[Shape]:
    for tick in range(_TICKS + 1):
        yield Label(_LEFT + _SPAN * tick / _TICKS, top + _HEIGHT + 16, f"{span_s * tick / _TICKS:.3g} s", "middle")


def _values_left(top: float, most: float) -> Iterator[Shape]:
    for tick in range(5):
        yield Label(_LEFT - 6, top + _HEIGHT * (1 - tick / 4) + 4, f"{most * tick / 4:.3g}", "end")
