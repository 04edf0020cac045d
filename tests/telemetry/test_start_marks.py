"""Marks of a process's start: set on one end of a pipe, read on the other."""

import os
from pathlib import Path

import pytest

from telemetry.start_marks import VARIABLE, MarkReader, StartMarks


def test_marks_are_read_by_name_and_the_variable_is_taken() -> None:
    read_end, write_end = os.pipe()
    reader, environ = MarkReader(read_end), {VARIABLE: str(write_end), "KEPT": "1"}
    marks = StartMarks.take(environ)
    assert reader.marks() == {}

    marks.set("process")
    marks.set("weights")

    found = reader.marks()
    assert list(found) == ["process", "weights"]
    assert found["process"].at <= found["weights"].at
    assert environ == {"KEPT": "1"}
    os.close(write_end)
    assert list(reader.marks()) == ["process", "weights"]
    reader.close()


@pytest.mark.parametrize("written", [b"\n\xff\nprocess x 1\n", b"process 1\n", b"a" * 200_000])
def test_an_invalid_mark_is_ignored(written: bytes) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    reader = MarkReader(read_end)

    os.write(write_end, written)

    assert reader.marks() == {}
    os.close(write_end)
    reader.close()


def test_marks_without_a_pipe_are_dropped(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        for text in ("", "x", "999999", str(file.fileno())):
            StartMarks.take({VARIABLE: text}).set("process")

    assert (tmp_path / "file").read_bytes() == b""
