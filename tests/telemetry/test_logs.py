"""Events are one line each, whatever clients put into them."""

import io
import logging
from collections.abc import Iterator

import pytest

from telemetry import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What is logged by pdserve's loggers while the test runs."""
    root = logging.getLogger("pdserve")
    before = root.handlers[:], root.level, root.propagate
    written = io.StringIO()
    logs.configure("info", written)
    yield written
    root.handlers[:], root.level, root.propagate = before[0], before[1], before[2]


def test_an_event_is_one_line_with_its_fields(stream: io.StringIO) -> None:
    logs.EventLogger("kv").info("sent", blocks=3, ms=1.23456789, why="two words", nothing="")

    (line,) = stream.getvalue().splitlines()
    assert line.endswith(' INFO pdserve.kv sent blocks=3 ms=1.23457 why="two words" nothing=""')


@pytest.mark.parametrize("hostile", ["x\n2026 ERROR fake", "\x1b[31mred", "a\r\u2028b", 'say "hi"', "\ud800"])
def test_what_a_client_sends_stays_in_its_field(stream: io.StringIO, hostile: str) -> None:
    logs.EventLogger("api").info("refused", model=hostile, last=1)

    (line,) = stream.getvalue().splitlines()
    assert line.isascii()
    assert line.isprintable()
    assert line.endswith(" last=1")
    assert ' model="' in line if " " in hostile else f" model={hostile.encode('unicode_escape').decode()}" in line


def test_long_values_are_cut() -> None:
    assert len(logs.render("e", {"value": "x" * 10_000})) < 1100


def test_an_event_below_the_level_is_not_rendered(stream: io.StringIO) -> None:
    class Loud:
        def __str__(self) -> str:
            raise AssertionError("rendered")

    logs.EventLogger("kv").debug("quiet", value=Loud())

    assert stream.getvalue() == ""
