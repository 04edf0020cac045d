"""The input is read once before anything else: what is invalid ends the run there, named by its lines."""

import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch.input_file import InputFile
from batch.job import BatchStopped, InputLimits
from wire.errors import ConfigError

LIMITS = InputLimits()


def _line(custom_id: str, **more: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, **more}).encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the input lies."""
    return tmp_path / "in.jsonl"


def _read(path: Path, content: bytes, limits: InputLimits = LIMITS) -> list[tuple[int, bytes]]:
    """Return number and content of each request."""
    path.write_bytes(content)
    source = InputFile.open(path, limits)
    try:
        return [(source.number(i), source.line(i)) for i in range(len(source))]
    finally:
        source.close()


def _refusal(path: Path, content: bytes, limits: InputLimits = LIMITS) -> str:
    with pytest.raises(ConfigError) as refused:
        _read(path, content, limits)
    return str(refused.value)


def test_requests_have_line_numbers_and_blank_lines_are_skipped(path: Path) -> None:
    a, b = _line("a"), _line("b")

    assert _read(path, b"\n" + a + b"\n\n  \t\n" + b + b"\n\n") == [(2, a), (5, b)]


def test_a_missing_last_newline_and_crlf_are_fine(path: Path) -> None:
    a, b = _line("a"), _line("b")

    assert _read(path, a + b"\r\n\r\n" + b) == [(1, a), (3, b)]


@pytest.mark.parametrize("content", [b"", b"\n", b"\r\n  \n"])
def test_an_input_without_requests_is_fine(path: Path, content: bytes) -> None:
    assert _read(path, content) == []


@given(st.lists(st.sampled_from([b"", b" ", b"\r", b"x"]), max_size=12), st.booleans(), st.data())
def test_any_mix_of_lines_and_blanks_is_split_at_newlines(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[bytes], has_last_newline: bool, data: st.DataObject
) -> None:  # fmt: skip
    lines = [_line(f"r{i}") if kind == b"x" else kind for i, kind in enumerate(kinds)]
    ends = [data.draw(st.sampled_from([b"\n", b"\r\n"])) for _ in lines]
    content = b"".join(line + end for line, end in zip(lines, ends, strict=True))
    content = content if has_last_newline else content.rstrip(b"\r\n")

    expected = [(n, one.strip()) for n, one in enumerate(content.split(b"\n"), 1) if one.strip()]
    assert _read(tmp_path_factory.mktemp("input") / "in", content) == expected


def test_the_digest_is_the_files_sha256(path: Path) -> None:
    content = b"\n" + _line("a") + b"\r\n" + _line("b")
    path.write_bytes(content)
    source = InputFile.open(path, LIMITS)
    source.close()

    assert source.digest == hashlib.sha256(content).hexdigest()


# What cannot be used


def test_all_bad_lines_are_named_at_once(path: Path) -> None:
    content = b"\n".join((_line("a"), b"{", b"", b'{"body": 1}', _line("b"), _line("a"), b'{"custom_id": 1}'))

    reported = _refusal(path, content).splitlines()

    assert reported == [
        f"{path}: nothing was run, because 4 lines cannot be used:",
        "  line 2 is the start of JSON over several lines: each request must be on one line",
        "  line 4 has no custom_id",
        "  line 6 repeats the custom_id 'a' of line 1",
        "  line 7 has a custom_id that is a JSON number, not a string",
    ]


def test_the_first_20_bad_lines_are_named_and_the_rest_counted(path: Path) -> None:
    reported = _refusal(path, b"x\n" * 50).splitlines()

    assert [line.split()[1] for line in reported[1:21]] == [str(n) for n in range(1, 21)]
    assert reported[21:] == ["  and 30 more"]
    assert "50 lines" in reported[0]


def test_one_bad_line_is_one_line(path: Path) -> None:
    assert "because 1 line cannot be used" in _refusal(path, b"x")


def test_a_custom_id_repeated_thrice_names_the_first_each_time(path: Path) -> None:
    reported = _refusal(path, b"\n".join([_line("a")] * 3))

    assert "line 2 repeats the custom_id 'a' of line 1" in reported
    assert "line 3 repeats the custom_id 'a' of line 1" in reported


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xef\xbb\xbf" + _line("a"), "begins with a byte order mark: save it as UTF-8 without one"),
        (_line("a").decode().encode("utf-16"), "is UTF-16: save it as UTF-8"),
        (gzip.compress(_line("a"), mtime=0), "is gzip-compressed: decompress it first"),
        (b"\xfe\xff" + _line("a").decode().encode("utf-16-be"), "is UTF-16: save it as UTF-8"),
        (_line("a") + b"\n\x00\n", "line 2 has a NUL byte at column 1"),
        (b'{"custom_id": "\xff"}', "line 1 is not UTF-8"),
        (b"[" * 100_000, "line 1 is nested too deeply"),
    ],
)
def test_lines_that_are_not_json_are_reported_with_a_reason(path: Path, content: bytes, words: str) -> None:
    assert words in _refusal(path, content)


# Limits


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_line_may_be_as_long_as_the_limit_and_no_byte_longer(path: Path, end: bytes) -> None:
    limits = InputLimits(max_line_bytes=64)
    fits = _line("a" * (64 - len(_line(""))))

    assert _read(path, _line("x") + b"\n" + fits + end, limits) == [(1, _line("x")), (2, fits)]
    reported = _refusal(path, _line("x") + b"\n" + _line("a" * (65 - len(_line("")))) + end, limits)
    assert "line 2 has 65 bytes, but the limit is 64 (--max-line-bytes)" in reported


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("length", [65, 66, 67, 68, 1000, 2**16, 2**16 + 1, 3 * 2**16 + 65])
def test_the_line_after_a_long_one_is_read_correctly(path: Path, length: int, end: bytes) -> None:
    limits = InputLimits(max_line_bytes=64)

    reported = _refusal(path, b"x" * length + end + _line("a") + b"\n" + b"{", limits)

    assert [one.split()[1] for one in reported.splitlines()[1:]] == ["1", "3"]
    assert f"line 1 has {length} bytes" in reported


def test_a_2_mb_line_is_refused_by_default(path: Path) -> None:
    assert "line 1 has 2000027 bytes, but the limit is 1048576" in _refusal(path, _line("a", x="y" * (2_000_000)))


def test_more_lines_or_bytes_than_the_limit_are_refused(path: Path) -> None:
    lines = b"\n".join(_line(f"r{i}") for i in range(5))

    assert "has more lines than the limit, 4 (--max-input-lines)" in _refusal(path, lines, InputLimits(max_lines=4))
    words = f"has {len(lines)} bytes, but the limit is 50 (--max-input-bytes)"
    assert words in _refusal(path, lines, InputLimits(max_bytes=50))
    assert len(_read(path, b"\n\n" + lines, InputLimits(max_lines=5, max_bytes=len(lines) + 2))) == 5


# What is not a regular file


def test_a_missing_input_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"in\.jsonl: No such file or directory"):
        InputFile.open(path, LIMITS)


def test_a_folder_and_a_pipe_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ConfigError, match="is not a regular file"):
            InputFile.open(path, LIMITS)


def test_a_file_longer_than_declared_is_refused_without_quoting_it() -> None:
    with pytest.raises(ConfigError) as refused:
        InputFile.open(Path("/proc/self/environ"), LIMITS)

    assert "PATH" not in str(refused.value)
    assert "wait until no program writes to it" in str(refused.value)


def test_a_line_that_changed_is_not_run(path: Path) -> None:
    path.write_bytes(_line("a") + b"\n" + _line("b"))
    source = InputFile.open(path, LIMITS)
    path.write_bytes(_line("a") + b"\n" + _line("c"))
    try:
        assert source.line(0) == _line("a")
        with pytest.raises(BatchStopped, match="line 2 was changed"):
            source.line(1)
    finally:
        source.close()


def test_a_refused_input_leaves_no_open_descriptor(path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for content in (b"x", b"\xff\xfe"):
        _refusal(path, content)

    assert set(os.listdir("/proc/self/fd")) <= before, "what others left may go meanwhile"
