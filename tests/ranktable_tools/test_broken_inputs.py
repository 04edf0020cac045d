"""Every broken input is refused in words with status 2, every rule has one, and the docs list them all."""

import pytest

from ranktable_tools.rules.catalogue import ACROSS_RULES, KEY_RULES, READING_RULES, TABLE_RULES
from tests.ranktable_tools.broken_inputs import SECTIONS, Broken
from tests.ranktable_tools.broken_table import BEGIN, DOCUMENT, answer, written

INPUTS = [broken for inputs in SECTIONS.values() for broken in inputs]


@pytest.mark.parametrize("broken", INPUTS, ids=[broken.what.replace(" ", "-") for broken in INPUTS])
def test_a_broken_input_is_told_with_status_2_and_nothing_is_written(broken: Broken) -> None:
    said, status, new = answer(broken)

    assert status == 2
    assert new == []
    assert said
    if broken.rule is None:
        assert said.startswith("ranktable: ")
        assert len(said.splitlines()) == 1
    else:
        assert f"[{broken.rule}]" in said
        assert "note: " not in said


def test_every_rule_has_a_broken_input() -> None:
    rules = {*READING_RULES, *KEY_RULES, *ACROSS_RULES, *(rule.code for rule in TABLE_RULES)}

    assert {broken.rule for broken in INPUTS} - {None} == rules


def test_the_document_lists_them_as_they_are_answered_today() -> None:
    document = DOCUMENT.read_text()

    assert BEGIN in document
    assert written(document) == document, "run scripts/broken-inputs"
