"""A wait for a task's result is limited by the time in which the process could run."""

import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from kvtransfer.process_group.issue import result_within
from tests.kvtransfer.rig import DEADLINE_S


@pytest.mark.parametrize("error", [None, TimeoutError("of the task itself")])
def test_a_result_may_be_late_while_its_waiter_is_starved(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: Future[str] = Future()
    late, looks = threading.Event(), itertools.count()

    def starved() -> float:
        if next(looks) == 10:  # by the wall the limit has passed, and the process did not run
            late.set()
        return 0.0

    monkeypatch.setattr("kvtransfer.process_group.issue.run_time", starved)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(result_within, waited, 0.01)
        assert late.wait(DEADLINE_S)
        if error is None:
            waited.set_result("late")
        else:
            waited.set_exception(error)

        assert got.exception(DEADLINE_S) is error
        assert error is not None or got.result() == "late"


def test_a_result_that_does_not_come_is_not_awaited_longer() -> None:
    with pytest.raises(TimeoutError):
        result_within(Future(), 0.01)
