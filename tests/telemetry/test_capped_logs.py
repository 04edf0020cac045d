"""Lines that a client can cause are limited, and the number of omitted lines is logged."""

import pytest

from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def log(clock: _Clock) -> CappedLog:
    return CappedLog(EventLogger("capped"), lines=3, window_s=60.0, clock=clock)


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "pdserve.capped"]


def test_few_lines_of_one_reason_are_written_in_a_window(log: CappedLog, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(100):
        log.warning("refused", "unknown_peer", who=number)

    assert _lines(caplog) == ["refused who=0", "refused who=1", "refused who=2"]


def test_the_same_text_is_written_once_a_window(
    log: CappedLog, clock: _Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        log.warning("refused", "unknown_peer", who="a")
        log.warning("refused", "unknown_peer", who="a")
        clock.now += 60.0

    messages = ["refused who=a", "log_lines_suppressed of=unknown_peer lines=1 within_s=60", "refused who=a"]
    assert _lines(caplog) == messages


def test_one_reason_does_not_suppress_another(log: CappedLog, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(100):
        log.warning("refused", "unknown_peer", who=number)
    log.warning("refused", "other secret", who="b")

    assert _lines(caplog)[-1] == "refused who=b"


def test_omitted_lines_are_reported_with_the_next_line_of_any_reason(
    log: CappedLog, clock: _Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(100):
        log.warning("refused", "unknown_peer", who=number)
    clock.now += 60.0
    log.warning("refused", "other secret", who="b")
    log.warning("refused", "other secret", who="c")

    messages = ["log_lines_suppressed of=unknown_peer lines=97 within_s=60", "refused who=b", "refused who=c"]
    assert _lines(caplog)[3:] == messages


def test_finished_windows_hold_no_memory(log: CappedLog, clock: _Clock) -> None:
    for number in range(50):
        log.info("over", f"reason {number}", who=number)
        clock.now += 61.0

    assert len(log._windows) == 1
