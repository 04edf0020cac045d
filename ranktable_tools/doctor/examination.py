"""Run all checks concurrently, until each has finished or their common deadline is reached."""

import queue
import threading
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING

from ranktable_tools.doctor.case import DoctorInput
from ranktable_tools.doctor.verdict import CheckResult, Verdict, fail
from ranktable_tools.errors import RanktableError

if TYPE_CHECKING:
    from ranktable_tools.doctor.checks import DoctorCheck  # imported late: it imports HTTP and more

TIMEOUT_S = 60.0


def examine(case: DoctorInput, timeout_s: float, checks: "Sequence[DoctorCheck]") -> list[CheckResult]:
    """Return a result for every check, in the order of `checks`; a check that times out is a failure.

    A driver's tools still run one at a time (`Machine.run_tool`). A check that hangs is abandoned on its daemon thread.
    """
    answers: queue.SimpleQueue[tuple[str, Verdict]] = queue.SimpleQueue()
    for check in checks:
        threading.Thread(target=_put, args=(answers, check, case), name=f"doctor {check.name}", daemon=True).start()
    deadline = monotonic() + timeout_s
    verdicts: dict[str, Verdict] = {}
    while len(verdicts) < len(checks):
        try:
            name, verdict = answers.get(timeout=max(0.0, deadline - monotonic()))
        except queue.Empty:
            break
        verdicts[name] = verdict
    late = fail(f"not done within {timeout_s:g} s", "try again with a longer --timeout; a tool or a name server hangs")
    return [CheckResult(check.name, verdicts.get(check.name, late)) for check in checks]


def _put(answers: "queue.SimpleQueue[tuple[str, Verdict]]", check: "DoctorCheck", case: DoctorInput) -> None:
    try:
        verdict = check.run(case)
    except RanktableError as error:
        verdict = fail(str(error), "")
    except Exception as error:  # noqa: BLE001 - a thread's outermost frame: a bug must not hide other findings
        verdict = fail(f"the check failed: {error!r}", "report it with the output of `pdserve collect-env`")
    answers.put((check.name, verdict))
