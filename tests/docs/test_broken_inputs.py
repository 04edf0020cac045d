"""Every broken input is refused with status 2 and a message, every rule has one, and the docs list them all."""

import pytest

from tests.docs.broken_input import Broken, answer
from tests.docs.broken_inputs import PARTS, SECTIONS
from tests.docs.broken_table import BEGIN, pages, rules
from tests.ranktable_tools.rules_in_chinese import RULES_IN_CHINESE

INPUTS = [pytest.param(one, id=f"{title}: {one.what}") for title, inputs in SECTIONS.items() for one in inputs]
CODES = [code for code, _, _ in rules()]


@pytest.mark.parametrize("broken", INPUTS)
def test_a_broken_input_ends_with_status_2_and_writes_nothing(broken: Broken) -> None:
    reported = answer(broken)

    assert (reported.status, reported.new) == (2, ())
    if broken.rule is None:
        assert broken.command.begins in reported.output[: len(broken.command.begins) + len("TIME-ERROR: ")]
        assert len(reported.output.splitlines()) == 1
    else:
        assert f"[{broken.rule}]" in reported.output
        assert "note: " not in reported.output


def test_every_rule_has_a_broken_input_and_a_chinese_sentence() -> None:
    found = {one.rule for inputs in SECTIONS.values() for one in inputs} - {None}

    assert found == set(CODES)
    assert list(RULES_IN_CHINESE) == CODES


def test_no_two_packages_share_a_heading() -> None:
    assert sum(map(len, PARTS)) == len(SECTIONS)


def test_the_pages_list_the_current_messages() -> None:
    for path, text in pages().items():
        assert BEGIN in text
        assert path.read_text() == text, f"{path.name}: run scripts/broken-inputs"
