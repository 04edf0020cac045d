"""Whether the results of a file are those on record. Pure."""

from collections.abc import Sequence

from tests.vllm_server_tests.left_out_names import leaves_out
from tests.vllm_server_tests.run_files import Result
from tests.vllm_server_tests.server_file import ServerFile


def differences(row: ServerFile, results: Sequence[Result]) -> list[str]:
    """Return a line for each difference between the record and what ran."""
    passed = {one.name for one in results if one.outcome == "passed"}
    failed = {one.name: one.message for one in results if one.outcome == "failed"}
    passed -= failed.keys()  # its call passed, and what came after did not
    ran = passed | failed.keys()
    lines = [f"{name} fails:\n{message}" for name, message in failed.items() if name not in row.failing]
    lines += [f"{name} is on record as a failure, and passes" for name in passed if name in row.failing]
    lines += [f"{name} is on record as a failure, and did not run" for name in row.failing if name not in ran]
    lines += [f"{one.name} was skipped: {one.message}" for one in results if one.outcome == "skipped"]
    left_out = [one.name for one in results if one.outcome == "left out"]
    lines += [
        f"{key} is to be left out, and there is no such test"
        for key in row.left_out
        if not any(leaves_out(key, name) for name in left_out)
    ]
    if len(left_out) != row.num_left_out:
        lines.append(f"{len(left_out)} tests were left out, on record are {row.num_left_out}")
    if len(passed) != row.passed:
        lines.append(f"{len(passed)} tests passed, on record are {row.passed}")
    return lines
