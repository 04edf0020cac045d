"""A picture of a load as SVG: when each request waited and streamed, tokens a second, and how latencies lie."""

import math
from collections.abc import Iterator, Sequence
from html import escape

from pdserve.bench.load.summary import times_s
from pdserve.bench.load.timeline import Timeline

_WIDTH, _LEFT, _RIGHT, _HEIGHT, _GAP, _TOP = 900, 70, 20, 200, 56, 44
_SPAN = _WIDTH - _LEFT - _RIGHT
_WAITS, _STREAMS, _FAILS, _RATE = "#c9ced6", "#2f6fb3", "#c0392b", "#2f6fb3"
_CURVES = (("ttft", "#2f6fb3"), ("tpot", "#2e8b57"), ("longest_gap", "#c0692b"), ("e2el", "#7a4fa3"))
_MOST_BARS = 400
_TICKS = 6


def draw(lines: Sequence[Timeline], *, title: str) -> str:
    """Return the picture of what ended: bars over time (grey: to the first token), rates, and latencies' shares."""
    panels = [_bars(lines), _rates(lines), _shares(lines)]
    height = _TOP + len(panels) * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_LEFT, 22, title, size=14),
    ]
    for place, panel in enumerate(panels):
        parts.append(f'<g transform="translate({_LEFT},{_TOP + place * (_HEIGHT + _GAP)})">')
        parts += [f'<rect width="{_SPAN}" height="{_HEIGHT}" fill="none" stroke="#888"/>', *panel, "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bars(lines: Sequence[Timeline]) -> Iterator[str]:
    yield _text(0, -6, "requests: waiting for the first token (grey), streaming (blue), failed (red)")
    began_s, span_s = _time_span(lines)
    yield from _seconds_below(span_s)
    shown = lines[:: max(1, math.ceil(len(lines) / _MOST_BARS))]
    height = _HEIGHT / max(1, len(shown))
    for row, line in enumerate(sorted(shown, key=lambda one: one.sent_s)):
        first_s = line.pieces_s[0] if line.pieces_s else line.end_s
        for start_s, end_s, colour in ((line.sent_s, first_s, _WAITS), (first_s, line.end_s, _STREAMS)):
            fill = colour if line.failure is None else _FAILS
            left, width = _SPAN * (start_s - began_s) / span_s, _SPAN * (end_s - start_s) / span_s
            yield _rect(left, row * height, width, max(0.3, 0.9 * height), fill)


def _rates(lines: Sequence[Timeline]) -> Iterator[str]:
    yield _text(0, -6, "output tokens a second")
    began_s, span_s = _time_span(lines)
    yield from _seconds_below(span_s)
    step_s = span_s / 60
    tokens = [0.0] * 60
    for line in lines:
        for piece_s in line.pieces_s:
            tokens[min(59, int((piece_s - began_s) / step_s))] += line.output_len / len(line.pieces_s)
    most = max(tokens) / step_s or 1.0
    yield from _values_left(most)
    for place, count in enumerate(tokens):
        height = _HEIGHT * count / step_s / most
        yield _rect(place * _SPAN / 60, _HEIGHT - height, 0.9 * _SPAN / 60, height, _RATE)


def _shares(lines: Sequence[Timeline]) -> Iterator[str]:
    yield _text(0, -6, "share of requests that took at most so many milliseconds")
    whole = [line for line in lines if line.failure is None]
    curves = {name: sorted(1000 * s for line in whole for s in times_s(line, name)) for name, _ in _CURVES}
    positive = [value for values in curves.values() for value in values if value > 0]
    low = math.floor(math.log10(min(positive, default=1.0)))
    high = max(low + 1, math.ceil(math.log10(max(positive, default=10.0))))
    for power in range(low, high + 1):
        x = _SPAN * (power - low) / (high - low)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y2="{_HEIGHT}" stroke="#ddd"/>'
        yield _text(x, _HEIGHT + 16, f"{10.0**power:g} ms", anchor="middle")
    yield from _values_left(1.0)
    for place, (name, colour) in enumerate(_CURVES):
        yield _text(8, 18 + 16 * place, name, colour=colour)
        values = curves[name]
        points = [
            (_SPAN * (math.log10(max(value, 10.0**low)) - low) / (high - low), _HEIGHT * (1 - (rank + 1) / len(values)))
            for rank, value in enumerate(values)
        ]
        if points:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(points[0][0], float(_HEIGHT)), *points])
            yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _time_span(lines: Sequence[Timeline]) -> tuple[float, float]:
    began_s = min((line.sent_s for line in lines), default=0.0)
    return began_s, max(1e-9, max((line.end_s for line in lines), default=1.0) - began_s)


def _seconds_below(span_s: float) -> Iterator[str]:
    for tick in range(_TICKS + 1):
        yield _text(_SPAN * tick / _TICKS, _HEIGHT + 16, f"{span_s * tick / _TICKS:.3g} s", anchor="middle")


def _values_left(most: float) -> Iterator[str]:
    for tick in range(5):
        yield _text(-6, _HEIGHT * (1 - tick / 4) + 4, f"{most * tick / 4:.3g}", anchor="end")


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}" fill="{fill}"/>'


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, colour: str = "#222") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}>{escape(words)}</text>"
