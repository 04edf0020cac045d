"""docs/faults.md has exactly one row for each failpoint and action of the code."""

import pytest

from processes.failpoints import POINTS, Failpoints
from tests.cluster.guide import CLONE
from tests.faults.cases import ANSWER, CASES, ERROR, HITS
from tests.faults.running import Measured
from tests.faults.table import render, rows_of

MEASURED = [
    Measured(case.place, case.action, case.victim, {ANSWER: 2, ERROR: 1}, "lost | req-12ab", 12.3, 45.6, None)
    for case in CASES
]


def test_the_page_names_the_codes_failpoints_and_actions() -> None:
    page = (CLONE / "docs" / "faults.md").read_text()

    assert rows_of(page) == [str(case) for case in CASES]
    for name, point in POINTS.items():
        assert f"| `{name}` | {point.who} {point.when} |" in page


def test_a_rendered_page_has_a_row_for_each_case() -> None:
    page = render(MEASURED)

    assert rows_of(page) == [str(case) for case in CASES]
    assert "the fault-free answer (2), an error event (1): “lost / …” | 12 | 46 |" in page


def test_results_that_omit_or_repeat_a_case_make_no_page() -> None:
    with pytest.raises(ValueError, match=str(CASES[0])):
        render(MEASURED[1:])
    with pytest.raises(ValueError, match="results for"):
        render([*MEASURED, MEASURED[0]])


def test_every_failpoint_has_its_actions_and_parsable_settings() -> None:
    assert {case.point for case in CASES} == set(POINTS)
    assert set(HITS) <= set(POINTS)
    for case in CASES:
        assert case.action in POINTS[case.point].actions
        Failpoints.parse(case.setting)
    assert len(CASES) == sum(len(point.actions) * len(HITS.get(name, (1,))) for name, point in POINTS.items())
