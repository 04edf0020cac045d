"""Each line of the checklist on tables (A7), launch (A8) and the order (A10) has a test named after it."""

import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
LINES = {"a7": range(81, 99), "a8": range(99, 120), "a10": range(139, 146)}
_TEST = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)
_NUMBERED = re.compile(r"(a\d+)((?:_\d+)+)(?=_)")


def named(name: str) -> Iterator[tuple[str, int]]:
    """Yield the lines in the name of a test: `test_a8_100_101_x` has two, as has `test_a7_97_a8_99_x`."""
    for part, numbers in _NUMBERED.findall(name):
        yield from ((part, int(number)) for number in numbers.split("_")[1:])


def test_a_name_may_have_several_lines() -> None:
    assert [*named("test_a7_97_a8_99_x")] == [("a7", 97), ("a8", 99)]
    assert [*named("test_a8_100_101_each_of_2_tables")] == [("a8", 100), ("a8", 101)]


def test_every_line_has_a_test_named_after_it() -> None:
    names = (name for path in TESTS.rglob("test_*.py") for name in _TEST.findall(path.read_text(encoding="utf-8")))
    found = {line for name in names for line in named(name)}
    wanted = {(part, number) for part, numbers in LINES.items() for number in numbers}

    assert wanted - found == set()
