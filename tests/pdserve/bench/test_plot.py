"""The plot of a load: a bar for each request, the tokens of each bin of time, and a curve for each latency."""

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from pdserve.bench.load.plot import BINS, FAILS, STREAMS, WAITS, draw, plot
from pdserve.bench.load.timeline import RequestFailure
from tests.conftest import MISSING
from tests.pdserve.bench.timelines import made

pytest.importorskip("matplotlib", reason=f"{MISSING}: matplotlib, of the extra `plot`")
LINES = [
    made(0.0, [1.0, 3.0], output_len=8),
    made(2.0, [1.0, 1.0], output_len=2),
    made(1.0, [], failure=RequestFailure("HTTP 429", "full")),
]
_SVG = "{http://www.w3.org/2000/svg}"


def bars(panel: int, colour: str) -> list[Any]:
    from matplotlib.colors import to_rgba

    shapes = draw(LINES, title="x").axes[panel].patches
    return [shape for shape in shapes if shape.get_facecolor() == to_rgba(colour)]


def test_bars_are_as_long_as_their_waits_and_streams() -> None:
    waits, streams = bars(0, WAITS), bars(0, STREAMS)

    assert [(bar.get_x(), bar.get_width()) for bar in waits] == [(0.0, 1.0), (2.0, 1.0)]
    assert [(bar.get_x(), bar.get_width()) for bar in streams] == [(1.0, 3.0), (3.0, 1.0)]
    assert len(bars(0, FAILS)) == 2


def test_tokens_are_drawn_at_the_time_they_arrived() -> None:
    heights = [bar.get_height() for bar in bars(1, STREAMS)]

    per_token = BINS / 4  # one token within a bin of the four seconds
    assert len(heights) == BINS
    assert [heights[place] / per_token for place in (15, 45, 59)] == pytest.approx([4, 1, 5])
    assert sum(height > 0 for height in heights) == 3


def test_a_curve_rises_to_all_requests() -> None:
    curves: list[Any] = list(draw(LINES, title="x").axes[2].lines)

    assert [curve.get_label() for curve in curves] == ["ttft", "tpot", "longest_gap", "e2el"]
    for curve in curves:
        shares = list(curve.get_ydata())
        assert shares == sorted(shares)
        assert (shares[0], shares[-1]) == (0, 1)


@pytest.mark.often("a load")
@pytest.mark.parametrize("lines", [LINES, []], ids=["a load", "nothing measured"])
def test_the_file_is_of_the_requested_type(lines: list[Any]) -> None:
    svg = plot(lines, title="<m> $& co$", file_type="svg")

    assert ElementTree.fromstring(svg).tag == f"{_SVG}svg"
    assert plot(lines, title="x", file_type="png").startswith(b"\x89PNG\r\n")
