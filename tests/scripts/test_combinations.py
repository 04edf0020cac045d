"""From a cross product, choose cases that have every combination of a few parameters' values."""

import itertools
from collections.abc import Mapping, Sequence

import pytest

from tests.combinations import cover

pytest_plugins = ["pytester"]
FACTORS = {"backend": 9, "batch": 8, "block_size": 2, "contiguous": 2}
CASES = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*map(range, FACTORS.values()))]


def _pairs(cases: Sequence[Mapping[str, int]]) -> set[tuple[tuple[str, int], ...]]:
    return {pair for case in cases for pair in itertools.combinations(case.items(), 2)}


def test_every_pair_of_values_is_in_a_chosen_case() -> None:
    chosen = [CASES[place] for place in cover(CASES, 2)]

    assert _pairs(chosen) == _pairs(CASES)
    assert len(chosen) == 9 * 8


def test_with_strength_one_every_value_is_in_a_chosen_case() -> None:
    chosen = [CASES[place] for place in cover(CASES, 1)]

    assert {name: {case[name] for case in chosen} for name in FACTORS} == {
        name: set(range(count)) for name, count in FACTORS.items()
    }
    assert len(chosen) == 9


def test_every_case_of_one_parameter_is_chosen() -> None:
    cases = [{"host": place} for place in range(20)]

    assert cover(cases, 2) == cover(cases, 1) == set(range(20))


def test_the_other_cases_are_marked_long(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import pytest\n"
        "from tests.combinations import mark_the_rest_long\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items): mark_the_rest_long(items)\n"
    )
    pytester.makepyfile(
        "import pytest\n"
        "@pytest.mark.combinations(1)\n"
        "@pytest.mark.parametrize('a', [pytest.param(9, marks=pytest.mark.skipif(True, reason='r')), *range(5)])\n"
        "@pytest.mark.parametrize('b', range(3))\n"
        "def test_both(a, b): assert isinstance(a, int)\n"
    )

    result = pytester.runpytest("-m", "not long", "-W", "ignore")

    result.assert_outcomes(passed=5, skipped=3, deselected=10)


_OFTEN = """
import pytest
@pytest.mark.often("a-1", "b-0")
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("text", ["a", "b", "c"])
def test_both(text, number): pass
"""


def test_cases_that_are_not_named_are_marked_long(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import pytest\n"
        "from tests.combinations import mark_the_unnamed_long\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items): mark_the_unnamed_long(items)\n"
    )
    file = pytester.makepyfile(test_named=_OFTEN, test_wrong=_OFTEN.replace("b-0", "b-2"))

    pytester.runpytest("-m", "not long", "-W", "ignore", str(file)).assert_outcomes(passed=2, deselected=4)
    pytester.runpytest("-W", "ignore", f"{file}::test_both[c-1]").assert_outcomes(passed=1)
    wrong = pytester.runpytest("-W", "ignore", "test_wrong.py")
    wrong.stderr.fnmatch_lines(["*often names no case by b-2*"])


def test_a_test_runs_only_one_case_on_the_second_loop(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import pytest\n"
        "from tests.combinations import mark_second_loops_long\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items): mark_second_loops_long(items)\n"
    )
    pytester.makepyfile(
        "import pytest\n"
        "@pytest.fixture(params=['asyncio', ('asyncio', {})])\n"
        "def anyio_backend(request): return request.param\n"
        "@pytest.mark.parametrize('a', range(5))\n"
        "def test_cases(anyio_backend, a): pass\n"
        "def test_alone(anyio_backend): pass\n"
    )

    result = pytester.runpytest("-m", "not long", "-W", "ignore")

    result.assert_outcomes(passed=5 + 1 + 2, deselected=4)
