"""An unusable line is refused with a message that quotes nothing of it but its custom_id."""

import json

import pytest

from batch.lines import BadLine, parse_line, shown_id


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"custom_id"', "is not JSON: unexpected end of data at column 13"),
        (b"{", "is the start of JSON over several lines: each request must be on one line"),
        (b" [ ", "is the start of JSON over several lines: each request must be on one line"),
        (b'{"custom_id": "a",}', "is not JSON: "),
        (b'{"custom_id": "a"} x', "is not JSON: "),
        (b"{'custom_id': 'a'}", "is not JSON: "),
        (b'{"custom_id": "a", "body": {"temperature": NaN}}', "is not JSON: "),
        (b'{"custom_id": "a", "body": "\\ud800"}', "is not JSON: "),
        (b'{"custom_id": "a\x00b"}', "has a NUL byte at column 17"),
        (b'{"custom_id": "a"}\x00', "has a NUL byte at column 19"),
        (b'{"custom_id": "\xff"}', "is not UTF-8: byte 0xff at column 16"),
        ('{"custom_id": "é"}'.encode("latin-1"), "is not UTF-8: byte 0xe9 at column 16"),
        (b'{"custom_id": "a", "body": ' + b"[" * 5000, "is nested too deeply: the limit is 1024 levels"),
        (b'{"custom_id": "a", "body": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001, "is nested too deeply"),
        (b'[{"custom_id": "a"}]', "is a JSON array, not an object"),
        (b'"custom_id"', "is a JSON string, not an object"),
        (b"3", "is a JSON number, not an object"),
        (b"null", "is a JSON null, not an object"),
        (b'{"id": "a"}', "has no custom_id"),
        (b'{"custom_id": null}', "has a custom_id that is a JSON null, not a string"),
        (b'{"custom_id": 7}', "has a custom_id that is a JSON number, not a string"),
        (b'{"custom_id": ["a"]}', "has a custom_id that is a JSON array, not a string"),
    ],
)  # fmt: skip
def test_an_unusable_line_is_reported_with_the_reason(content: bytes, words: str) -> None:
    with pytest.raises(BadLine) as bad:
        parse_line(content)

    assert str(bad.value).startswith(words)


def test_a_bad_lines_content_is_not_quoted() -> None:
    with pytest.raises(BadLine) as bad:
        parse_line(b'{"custom_id": "a", "body": "hunter2"')

    assert "hunter2" not in str(bad.value)


@pytest.mark.parametrize("custom_id", ["", "a", "é", "../../x", "a\nb", "x" * 10_000, "\U0001f600"])
def test_any_string_is_a_custom_id(custom_id: str) -> None:
    request = {"custom_id": custom_id, "body": {"deep": [[[{"a": 1.5}]]]}, "other": None}

    assert parse_line(json.dumps(request).encode()) == request


def test_an_error_shows_the_beginning_of_a_long_custom_id() -> None:
    assert shown_id("a\nb") == r"'a\nb'"
    assert len(shown_id("x" * 10_000)) < 80
