"""The picture of a load has a bar for each request, and is the same as SVG and as PNG."""

import io
import xml.etree.ElementTree as ElementTree

import pytest
from PIL import Image

from pdserve.bench.load.plot import FAILS, STREAMS, WAITS, draw
from pdserve.bench.load.png import SCALE, to_png
from pdserve.bench.load.shapes import Box, Label, Path, Picture
from pdserve.bench.load.svg import to_svg
from pdserve.bench.load.timeline import RequestFailure
from tests.pdserve.bench.timelines import made

LINES = [
    made(0.0, [1.0, 3.0], output_len=8),
    made(2.0, [1.0, 1.0], output_len=2),
    made(1.0, [], failure=RequestFailure("HTTP 429", "full")),
]
_SVG = "{http://www.w3.org/2000/svg}"


def boxes(picture: Picture, fill: str) -> list[Box]:
    return [shape for shape in picture.shapes if isinstance(shape, Box) and shape.fill == fill]


def test_bars_are_as_long_as_their_waits_and_streams() -> None:
    picture = draw(LINES, title="x")

    first, second = boxes(picture, WAITS)
    assert first.width == second.width == pytest.approx(780 / 4)  # one second of four
    assert [first.x, second.x] == pytest.approx([70, 70 + 780 / 2])
    assert boxes(picture, STREAMS)[0].width == pytest.approx(780 * 3 / 4)
    assert len(boxes(picture, FAILS)) == 2


def test_tokens_are_drawn_in_the_time_they_came() -> None:
    # The bars of tokens come after those of the two streams.
    tokens = [box.height for box in boxes(draw(LINES, title="x"), STREAMS)[2:]]

    assert len(tokens) == 60
    assert [round(height / 200 * 5) for height in (tokens[15], tokens[45], tokens[59])] == [4, 1, 5]
    assert sum(height > 0 for height in tokens) == 3


def test_a_curve_rises_to_all_requests() -> None:
    curves = [shape for shape in draw(LINES, title="x").shapes if isinstance(shape, Path) and shape.width == 1.5]

    assert len(curves) == 4
    for curve in curves:
        heights = [y for _, y in curve.points]
        assert heights == sorted(heights, reverse=True)
        assert heights[0] - heights[-1] == 200


def test_svg_has_every_shape_and_escapes_its_words() -> None:
    picture = draw(LINES, title="<m> & co")

    root = ElementTree.fromstring(to_svg(picture))

    assert len(list(root)) == 1 + len(picture.shapes)
    assert next(root.iter(f"{_SVG}text")).text == "<m> & co"


def test_png_has_the_colours_where_the_shapes_are() -> None:
    picture = Picture(
        40, 30, [Box(10, 10, 20, 10, "#ff0000"), Path([(0, 5), (40, 5)], "#0000ff"), Label(2, 28, "a", "start")]
    )

    image = Image.open(io.BytesIO(to_png(picture)))

    assert image.size == (40 * SCALE, 30 * SCALE)
    assert image.getpixel((20 * SCALE, 15 * SCALE)) == (255, 0, 0)
    assert image.getpixel((20 * SCALE, 5 * SCALE)) == (0, 0, 255)
    assert image.getpixel((35 * SCALE, 25 * SCALE)) == (255, 255, 255)
    letter = image.crop((0, 22 * SCALE, 10 * SCALE, 29 * SCALE))
    assert letter.getextrema() != ((255, 255), (255, 255), (255, 255))


def test_nothing_measured_is_a_picture_too() -> None:
    picture = draw([], title="none")

    assert ElementTree.fromstring(to_svg(picture)).tag == f"{_SVG}svg"
    assert Image.open(io.BytesIO(to_png(picture))).format == "PNG"
