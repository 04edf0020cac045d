"""The record of vLLM's tests: what differs from it is a failure, and the number that passes never falls."""

import pytest

from tests.vllm_server_tests.files import FILES
from tests.vllm_server_tests.files_left_out import LEFT_OUT
from tests.vllm_server_tests.judged import differences
from tests.vllm_server_tests.run_files import Result
from tests.vllm_server_tests.server_file import ServerFile

LEAST = 325
"""Tests that pass: raise it with each one more."""
ROW = ServerFile(passed=1, failing={"b": "why"}, left_out={"c": "why"}, num_left_out=1)
AS_RECORDED = {"a": "passed", "b": "failed", "c[1]": "left out"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"a": "failed"}, "a fails"),
        ({"b": "passed"}, "b is on record as a failure, and passes"),
        ({"b": "left out"}, "b is on record as a failure, and did not run"),
        ({"c[1]": "passed"}, "c is to be left out, and there is no such test"),
        ({"d": "passed"}, "2 tests passed, on record are 1"),
        ({"a": "skipped"}, "a was skipped"),
    ],
)
def test_each_difference_from_the_record_is_a_line(changed: dict[str, str], said: str | None) -> None:
    found = [Result(name, outcome, "") for name, outcome in (AS_RECORDED | changed).items()]

    lines = differences(ROW, found)

    assert (lines == []) if said is None else any(line.startswith(said) for line in lines), lines


def test_no_file_is_both_taken_and_left_out() -> None:
    left_out = [file for files in LEFT_OUT.values() for file in files]

    assert len(left_out) == len(set(left_out))
    assert not FILES.keys() & set(left_out)


def test_the_number_that_passes_never_falls() -> None:
    assert sum(row.passed for row in FILES.values()) >= LEAST
