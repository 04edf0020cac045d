"""The records of requests with an Idempotency-Key on one instance."""

import dataclasses
from typing import Any

import pytest

from wire.claim_table import KEPT_S, MAX_CLAIM_BYTES, MAX_KEPT_ANSWER, ClaimTable
from wire.messages import Claimed, ClaimRun, ClaimState, EndClaim, Event, RunEnd

OTHER = {"claim_id": "c2", "stream_id": "s2"}


class _Scheduler:
    """A session with a scheduler."""

    def __init__(self) -> None:
        self.ended = False
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Record an event."""
        self.events.append(event)


class _Holder:
    """A table, its schedulers and the time."""

    def __init__(self) -> None:
        self.table, self.now = ClaimTable(), 0.0
        self.first, self.second = _Scheduler(), _Scheduler()

    def claim(self, by: _Scheduler, **changes: str) -> Claimed:
        command = dataclasses.replace(ClaimRun("c1", "record", "key-1", "digest", "s1"), **changes)
        self.table.handle(by, command, self.now)
        answer = by.events.pop()
        assert isinstance(answer, Claimed)
        assert answer.claim_id == command.claim_id
        return answer

    def end(self, end: RunEnd, answer: bytes = b"", **changes: Any) -> None:
        command = dataclasses.replace(EndClaim("c1", "record", "key-1", "digest", end, answer), **changes)
        self.table.handle(self.first, command, self.now)


@pytest.fixture
def holder() -> _Holder:
    """A table with one running request."""
    made = _Holder()
    assert made.claim(made.first).state is ClaimState.NEW
    return made


@pytest.mark.parametrize(
    ("end", "changes", "state"),
    [
        (None, {}, ClaimState.RUNNING),
        (RunEnd.LEFT, {}, ClaimState.LEFT),
        (RunEnd.MOVED, {}, ClaimState.ORPHANED),
        (RunEnd.FAILED, {}, ClaimState.NEW),
        (RunEnd.FAILED, {"claim_id": "c0"}, ClaimState.RUNNING),
        (RunEnd.DONE, {}, ClaimState.DONE),
        (RunEnd.DONE, {"claim_id": "c0"}, ClaimState.DONE),
        (RunEnd.DONE, {"digest": "d0"}, ClaimState.RUNNING),
    ],
)
def test_the_end_of_a_run_decides_the_next_claim(
    holder: _Holder, end: RunEnd | None, changes: dict[str, str], state: ClaimState
) -> None:
    if end is not None:
        holder.end(end, b"{}", **changes)
    answer = holder.claim(holder.second, **OTHER)

    assert answer.state is state
    assert answer.answer == (b"{}" if state is ClaimState.DONE else b"")
    if state in (ClaimState.RUNNING, ClaimState.LEFT, ClaimState.ORPHANED):
        assert answer.stream_id == "s1"
    assert holder.claim(holder.second, digest="changed", **OTHER).state is ClaimState.DIFFERENT


def test_an_orphan_is_given_to_one_scheduler(holder: _Holder) -> None:
    holder.first.ended = True

    assert holder.claim(holder.second, **OTHER).state is ClaimState.ORPHANED
    assert holder.claim(_Scheduler(), claim_id="c3", stream_id="s3") == Claimed("c3", ClaimState.RUNNING, "s1")


def test_who_adopted_the_stream_owns_the_run(holder: _Holder) -> None:
    assert holder.claim(holder.second, claim_id="c2").state is ClaimState.NEW
    holder.end(RunEnd.FAILED)  # by the owner before

    assert holder.claim(holder.first, claim_id="c3", stream_id="s3").state is ClaimState.RUNNING


def test_answers_and_orphans_are_kept_for_a_time(holder: _Holder) -> None:
    holder.end(RunEnd.DONE, b"{}")
    assert holder.claim(holder.first, record_id="running").state is ClaimState.NEW
    holder.now = KEPT_S - 1
    assert holder.claim(holder.second, **OTHER).state is ClaimState.DONE
    holder.now = KEPT_S
    assert holder.claim(holder.second, **OTHER).state is ClaimState.NEW
    assert holder.claim(holder.second, record_id="running", **OTHER).state is ClaimState.RUNNING


def test_a_key_has_a_bound_in_bytes(holder: _Holder) -> None:
    holder.end(RunEnd.DONE, b"x" * (MAX_KEPT_ANSWER + 1))
    assert holder.claim(holder.second, **OTHER) == Claimed("c2", ClaimState.DONE)  # without its answer
    num_answers = MAX_CLAIM_BYTES // MAX_KEPT_ANSWER
    for number in range(num_answers):
        holder.end(RunEnd.DONE, b"x" * MAX_KEPT_ANSWER, record_id=str(number))
    states = [holder.claim(holder.second, record_id=str(number)).state for number in range(num_answers)]

    assert set(states[1:]) == {ClaimState.DONE}
    assert states[0] is ClaimState.NEW  # the oldest was forgotten


def test_a_key_has_a_bound_of_running_requests(holder: _Holder) -> None:
    number = 0
    while holder.claim(holder.first, record_id=str(number), stream_id=str(number)).state is ClaimState.NEW:
        number += 1

    assert 1000 < number < MAX_CLAIM_BYTES // 256
    assert holder.claim(holder.first, record_id=str(number)).state is ClaimState.FULL
    assert holder.claim(holder.first, record_id=str(number), tenant="key-2").state is ClaimState.NEW
