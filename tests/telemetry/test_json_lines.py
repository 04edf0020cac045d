"""With --log-format json every line is one object, whatever its fields hold."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from telemetry import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What is logged while the test runs, as JSON."""
    ours, everyone = logging.getLogger("pdserve"), logging.getLogger()
    before = ours.handlers[:], ours.level, ours.propagate, everyone.handlers[:]
    written = io.StringIO()
    logs.configure("debug", written, "json")
    yield written
    ours.handlers[:], ours.level, ours.propagate, everyone.handlers[:] = before


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_an_object_with_its_fields_as_they_are(stream: io.StringIO) -> None:
    logs.EventLogger("kv").info("sent", request_id="r1", blocks=3, ms=1.25, early=True, why=None, at=ValueError("no"))

    (line,) = _lines(stream)
    time = line.pop("time")
    assert line == {
        "level": "INFO", "component": "kv", "event": "sent", "request_id": "r1", "blocks": 3, "ms": 1.25,
        "early": True, "why": None, "at": "no",
    }  # fmt: skip
    assert time.endswith("Z")
    assert len(time) == len("2026-01-31T12:00:00.123Z")


@pytest.mark.parametrize(
    "hostile", ["x\n{}", '"}\n{"level": "ERROR"', "\x1b[31mred", "a\r\u2028b", "\ud800", "\x00", "你好"]
)
def test_what_a_client_sends_stays_in_its_field(stream: io.StringIO, hostile: str) -> None:
    logs.EventLogger("api").info("refused", model=hostile, last=1)

    assert stream.getvalue().isascii()
    (line,) = _lines(stream)
    assert (line["model"], line["last"], line["level"]) == (hostile, 1, "INFO")


def test_a_field_cannot_replace_the_lines_own_keys(stream: io.StringIO) -> None:
    logs.EventLogger("api").info("refused", level="ERROR", time="never", message="m")

    (line,) = _lines(stream)
    assert (line["level"], line["level_"], line["time_"], line["message_"]) == ("INFO", "ERROR", "never", "m")


def test_long_values_are_cut_and_non_numbers_become_text(stream: io.StringIO) -> None:
    logs.EventLogger("api").info("refused", long="x" * 5000, most=float("inf"), some={"a": "y" * 5000})

    (line,) = _lines(stream)
    assert len(line["long"]) == len(line["some"]) == 1001
    assert line["most"] == "inf"


def test_a_traceback_is_in_its_line(stream: io.StringIO) -> None:
    try:
        raise RuntimeError("broke\nin two lines")
    except RuntimeError as error:
        logs.EventLogger("engine").error("step_failed", error, request_id="r")

    (line,) = _lines(stream)
    assert "RuntimeError: broke\nin two lines" in line["exception"]
    assert line["request_id"] == "r"


def test_library_warnings_are_objects_too_and_uvicorn_is_silent(stream: io.StringIO) -> None:
    logging.getLogger("asyncio").error("Task %s\nwas lost", "t")
    logging.getLogger("asyncio").info("not this")
    logging.getLogger("uvicorn.error").error("nor this")
    logging.getLogger("pdserve.native").info("native_built library=%s", "kv")

    lines = _lines(stream)
    assert [(line["component"], line["event"], line["message"]) for line in lines] == [
        ("asyncio", "Task", "Task t\nwas lost"), ("native", "native_built", "native_built library=kv"),
    ]  # fmt: skip


def test_an_unknown_log_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'xml' is not one of text, json"):
        logs.configure("info", io.StringIO(), "xml")
