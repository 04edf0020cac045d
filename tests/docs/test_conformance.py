"""docs/conformance.md is what the tests say, and has no open line."""

from tests.docs.conformance_page import LINES, PAGE, named_tests, page
from tests.docs.conformance_surfaces import SURFACES


def test_every_line_has_a_test_named_after_it() -> None:
    found = named_tests()

    assert {(part, number) for part, lines in LINES.items() for number in lines} - found.keys() == set()


def test_the_page_is_what_the_tests_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run scripts/conformance"


def test_no_test_is_named_after_a_line_that_is_not_there() -> None:
    known = {(part, number) for part, lines in LINES.items() for number in lines}

    assert {line for line in named_tests() if line[0] in SURFACES or line[0] == "a11"} - known == set()
