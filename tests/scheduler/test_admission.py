"""The queue alone: its order, its head, leaving it, and what a cancelled caller gives back."""

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest

from scheduler.admission import Admission
from scheduler.grants import Grant
from scheduler.limits import ControlLimits
from scheduler.load.loads import PromptFacts
from scheduler.load.path_costs import Expected
from scheduler.queue.queue_entry import QueueEntry
from scheduler.request_class import RequestClass
from tests.scheduler.virtual_time import virtual
from wire.errors import NeverFits, Overloaded


class _Room:
    """Grants while there is room; a grant is just the prompt's id."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.largest = 1000
        self.requested_prefill_only = False
        self.tried: list[str] = []
        self.granted: list[str] = []
        self.released: list[str] = []

    def refresh(self) -> None:
        pass

    def first_token_s(self, waiting: int, num_tokens: int) -> Expected:
        return Expected((waiting + num_tokens) / 100, num_tokens / 200)

    def has_room(self, *, prefill_only: bool) -> bool:
        self.requested_prefill_only = prefill_only
        return self.room > 0

    def try_place(self, prompt_id: str, facts: PromptFacts) -> Any:
        self.tried.append(prompt_id)
        if facts.num_tokens > 1000:
            raise NeverFits("too long")
        if self.room == 0 or facts.num_tokens > self.largest:
            return None
        self.room -= 1
        self.granted.append(prompt_id)
        return _Granted(self, prompt_id)


class _Granted(Grant):
    def __init__(self, room: _Room, prompt_id: str) -> None:
        self._room = room
        self._id = prompt_id

    def release(self) -> None:
        self._room.released.append(self._id)


def waiting(prompt_id: str, num_tokens: int = 10, turn: int = 0, *, tenant: str = "", priority: int = 0) -> QueueEntry:
    return QueueEntry(prompt_id, PromptFacts(num_tokens, 2), turn, tenant=tenant, priority=priority)


@virtual
async def test_the_head_is_not_overtaken_and_returned_prompts_come_first() -> None:
    room = _Room(0)
    admission = Admission(ControlLimits(), room)
    for name in "abc":
        admission.enter(waiting(name))
    admission.enter(waiting("again"), front=True)

    assert (admission.num_waiting, admission.waiting_tokens) == (4, 40)
    room.room = 3
    admission.pump()
    assert room.granted == ["again", "a", "b"]


@virtual
async def test_a_prompt_that_never_fits_fails_and_the_next_continues() -> None:
    room = _Room(1)
    admission = Admission(ControlLimits(), room)
    long = waiting("long", 1001)
    admission.enter(long)
    admission.enter(waiting("short"))

    assert room.granted == ["short"]
    with pytest.raises(NeverFits):
        await long.grant


@virtual
async def test_leaving_returns_the_place_or_the_grant() -> None:
    room = _Room(0)
    admission = Admission(ControlLimits(), room)
    first, second = waiting("first"), waiting("second")
    admission.enter(first)
    admission.enter(second)

    admission.leave(first)
    room.room = 1
    admission.pump()
    admission.leave(second)
    assert room.granted == ["second"]
    assert room.released == ["second"]


@virtual
async def test_the_place_of_a_cancelled_caller_is_skipped() -> None:
    room = _Room(0)
    admission = Admission(ControlLimits(), room)
    gone, next_one = waiting("gone"), waiting("next")
    admission.enter(gone)
    admission.enter(next_one)
    gone.grant.cancel()
    room.room = 1
    admission.pump()

    assert room.granted == ["next"]


@virtual
async def test_a_request_of_many_prompts_alternates_with_others() -> None:
    room = _Room(0)
    admission = Admission(ControlLimits(), room)
    for turn in range(64):
        admission.enter(waiting(f"many{turn}", turn=turn))
    for number in range(100):
        admission.enter(waiting(f"one{number}"))
        room.room = 1
        admission.pump()

    assert room.granted[:3] == ["many0", "one0", "one1"]
    assert sum(name.startswith("many") for name in room.granted) == 20
    room.room = 200
    admission.pump()
    assert admission.num_waiting == 0


@virtual
async def test_a_prompt_without_room_is_overtaken_a_limited_number_of_times() -> None:
    room = _Room(1000)
    room.largest = 100
    admission = Admission(ControlLimits(), room)
    admission.enter(waiting("large", 500))
    for number in range(30):
        admission.enter(waiting(f"small{number}"))

    assert room.granted == [f"small{number}" for number in range(16)]
    room.largest = 1000
    admission.pump()
    assert room.granted[16:18] == ["large", "small16"]


@virtual
async def test_a_prompt_overtaken_often_keeps_its_turn() -> None:
    room = _Room(1000)
    room.largest = 100
    admission = Admission(ControlLimits(), room)
    again = waiting("again", 500)
    again.num_overtaken = 16
    admission.enter(again, front=True)
    admission.enter(waiting("short"))

    assert room.granted == []


@virtual
async def test_when_one_that_all_wait_for_leaves_the_others_go_at_once() -> None:
    room = _Room(1000)
    room.largest = 100
    admission = Admission(ControlLimits(), room)
    large = waiting("large", 500)
    admission.enter(large)
    for number in range(20):
        admission.enter(waiting(f"small{number}"))
    assert admission.num_waiting == 5

    admission.leave(large)
    assert admission.num_waiting == 0
    assert len(room.granted) == 20


@virtual
async def test_changes_behind_a_long_queue_retry_no_prompt() -> None:
    room = _Room(0)
    admission = Admission(ControlLimits(), room)
    places = [waiting(str(number)) for number in range(2000)]
    for place in places:
        admission.enter(place)
    assert len(room.tried) == 8

    for place in reversed(places[8:]):
        admission.leave(place)
    assert len(room.tried) == 8
    admission.pump()
    assert len(room.tried) == 8
    room.room, room.largest = 1, 0
    admission.pump()
    assert len(room.tried) == 16


@virtual
async def test_many_simultaneous_changes_are_processed_once() -> None:
    room = _Room(0)
    admission = Admission(ControlLimits(), room)
    admission.enter(waiting("a"))
    room.room, room.largest = 5, 0
    for _ in range(10):
        admission.changed()
    assert room.tried == ["a"]
    room.largest = 1000
    await asyncio.sleep(0)

    assert room.granted == ["a"]
    assert len(room.tried) == 2


@virtual
async def test_an_overtaking_prompt_is_charged_to_its_own_tenant() -> None:
    room = _Room(1000)
    room.largest = 100
    admission = Admission(ControlLimits(), room)
    admission.enter(waiting("large", 500, tenant="large"))
    for number in range(4):
        admission.enter(waiting(f"a{number}", tenant="a"))
    room.room = 0
    for number in range(4):
        admission.enter(waiting(f"b{number}", tenant="b"))
        admission.enter(waiting(f"a{number + 4}", tenant="a"))
    room.room, room.largest = 5, 1000
    admission.pump()

    assert room.granted == ["a0", "a1", "a2", "a3", "large", "b0", "b1", "b2", "b3"]


@virtual
async def test_priorities_and_tenants_share_one_queue() -> None:
    room = _Room(0)
    admission = Admission(ControlLimits(), room)
    for number in range(3):
        admission.enter(waiting(f"later{number}", tenant="a", priority=1))
    for number in range(3):
        admission.enter(waiting(f"a{number}", tenant="a"))
    admission.enter(waiting("b", tenant="b"))
    admission.enter(waiting("urgent", tenant="a", priority=-5))
    room.room = 8
    admission.pump()

    assert room.granted == ["urgent", "a0", "b", "a1", "a2", "later0", "later1", "later2"]


@virtual
async def test_a_key_that_filled_its_share_is_refused_and_others_are_not() -> None:
    admission = Admission(ControlLimits(max_queued_requests=4, num_tenants=2), _Room(0))
    for name in "xy":
        admission.check_room(1, 10, "a")
        admission.enter(waiting(name, tenant="a"))

    admission.check_room(1, 10, "b")
    with pytest.raises(Overloaded, match=r"share of the queue is full: .* 3 prompts") as caught:
        admission.check_room(1, 10, "a")
    assert caught.value.retry_after_s >= 1


@virtual
async def test_retry_after_ignores_the_time_without_a_queue() -> None:
    room = _Room(0)
    admission = Admission(ControlLimits(max_queued_requests=2), room)
    for _ in range(3):
        granted, cancelled = waiting("granted"), waiting("cancelled")
        admission.enter(granted)
        admission.enter(cancelled)
        room.room = 1
        admission.pump()
        admission.leave(cancelled)
        room.room = 1
        admission.enter(waiting("at once"))
        await asyncio.sleep(1000.0)

    for name in "ab":
        admission.enter(waiting(name))
    with pytest.raises(Overloaded) as caught:
        admission.check_room(1, 10)
    assert caught.value.retry_after_s == 1


@virtual
async def test_room_for_vectors_is_requested_while_one_waits() -> None:
    room = _Room(0)
    admission = Admission(ControlLimits(), room)
    vector = QueueEntry("vector", PromptFacts(10, 1, pooled=True))

    def room_requested() -> bool:
        admission.pump()
        return room.requested_prefill_only

    admission.enter(waiting("a"))
    assert not room_requested()
    admission.enter(vector)
    assert room_requested()
    admission.leave(vector)
    assert not room_requested()


@pytest.mark.parametrize(
    ("limit_s", "num_tokens", "message", "retry_after_s", "is_final"),
    [
        (0.0, 10**6, None, 0, False),  # no limit
        (3.0, 250, None, 0, False),  # 50 tokens wait: 3 s
        (3.0, 251, "is expected after 3.0 s (limit 3 s, --ttft-limit)", 1, False),
        (3.0, 550, "is expected after 6.0 s (limit 3 s, --ttft-limit)", 3, False),
        (3.0, 601, "is expected after 3.0 s on an idle cluster (limit 3 s, --ttft-limit)", 4, True),
        (0.5, 10**6, "is expected after 5000.0 s on an idle cluster (limit 0.5 s, --ttft-limit)", 60, True),
    ],
)
@virtual
async def test_a_first_token_after_the_limit_is_refused_at_once(
    limit_s: float, num_tokens: int, message: str | None, retry_after_s: int, is_final: bool
) -> None:
    admission = Admission(ControlLimits(ttft_limit_s=limit_s), _Room(0))
    admission.enter(waiting("a", 50))

    if message is None:
        admission.check_room(1, num_tokens)
        return
    with pytest.raises(Overloaded) as caught:
        admission.check_room(1, num_tokens)

    assert str(caught.value).endswith(message)
    assert (caught.value.retry_after_s, caught.value.is_final) == (retry_after_s, is_final)


@pytest.mark.parametrize(
    ("of_class_s", "message"), [(None, "(limit 3 s, --ttft-limit)"), (2.0, "(limit 2 s, class batch)"), (3.5, "")]
)
@virtual
async def test_a_class_has_its_own_limit_of_the_first_token(of_class_s: float | None, message: str) -> None:
    admission = Admission(ControlLimits(ttft_limit_s=3.0), _Room(0))
    admission.enter(waiting("a", 50))

    with pytest.raises(Overloaded) if message else nullcontext() as caught:
        admission.check_room(1, 251, "", RequestClass("batch", of_class_s))

    assert caught is None or message in str(caught.value)


@virtual
async def test_of_many_refused_for_their_first_token_some_may_retry() -> None:
    admission = Admission(ControlLimits(ttft_limit_s=3.0), _Room(0))

    def finals(count: int) -> list[bool]:
        found = []
        for _ in range(count):
            with pytest.raises(Overloaded, match=r"first token is expected after 6\.0 s") as caught:
                admission.check_room(1, 600 - admission.waiting_tokens)
            found.append(caught.value.is_final)
        return found

    for name in "abcdefghij":  # as many refusals more as 15% of these
        admission.enter(waiting(name, 1))
    assert finals(9) == [False] * 6 + [True] * 3
    for number in range(300):
        entry = waiting(f"w{number}", 1)
        admission.enter(entry)
        admission.leave(entry)
        admission.enter(entry, front=True)  # a retry is no other prompt
        admission.leave(entry)
    assert finals(60) == [False] * 45 + [True] * 15
