"""The queue on its own: order, front, leaving, and what a caller that goes away gives back."""

from typing import Any

import pytest

from scheduler.admission import Admission, Waiting
from scheduler.grants import Grant
from scheduler.limits import ControlLimits
from scheduler.loads import PromptFacts
from tests.scheduler.virtual_time import virtual
from wire.errors import NeverFits


class _Room:
    """Grants as long as there is room; a grant is just the prompt's id."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.largest = 1000
        self.granted: list[str] = []
        self.released: list[str] = []

    def try_place(self, prompt_id: str, facts: PromptFacts) -> Any:
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


def waiting(prompt_id: str, num_tokens: int = 10, turn: int = 0) -> Waiting:
    return Waiting(prompt_id, PromptFacts(num_tokens, 1), turn)


@virtual
async def test_the_head_is_not_overtaken_and_the_front_comes_first() -> None:
    room = _Room(0)
    admission = Admission(ControlLimits(), room.try_place)
    for name in "abc":
        admission.enter(waiting(name))
    admission.enter(waiting("again"), front=True)

    assert (admission.num_waiting, admission.waiting_tokens) == (4, 40)
    room.room = 3
    admission.pump()
    assert room.granted == ["again", "a", "b"]


@virtual
async def test_one_that_never_fits_ends_and_the_next_goes_on() -> None:
    room = _Room(1)
    admission = Admission(ControlLimits(), room.try_place)
    long = waiting("long", 1001)
    admission.enter(long)
    admission.enter(waiting("short"))

    assert room.granted == ["short"]
    with pytest.raises(NeverFits):
        await long.grant


@virtual
async def test_leaving_gives_back_a_place_or_a_grant() -> None:
    room = _Room(0)
    admission = Admission(ControlLimits(), room.try_place)
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
async def test_a_place_whose_caller_was_cancelled_is_skipped() -> None:
    room = _Room(0)
    admission = Admission(ControlLimits(), room.try_place)
    gone, next_one = waiting("gone"), waiting("next")
    admission.enter(gone)
    admission.enter(next_one)
    gone.grant.cancel()
    room.room = 1
    admission.pump()

    assert room.granted == ["next"]


@virtual
async def test_a_request_of_many_prompts_lets_others_in_between_and_is_not_put_off_for_ever() -> None:
    room = _Room(0)
    admission = Admission(ControlLimits(), room.try_place)
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
async def test_one_without_room_is_passed_by_the_next_but_only_so_often() -> None:
    room = _Room(1000)
    room.largest = 100
    admission = Admission(ControlLimits(), room.try_place)
    admission.enter(waiting("large", 500))
    for number in range(30):
        admission.enter(waiting(f"small{number}"))

    assert room.granted == [f"small{number}" for number in range(16)]
    room.largest = 1000
    admission.pump()
    assert room.granted[16:18] == ["large", "small16"]


@virtual
async def test_one_that_was_passed_often_and_refused_after_all_is_not_passed_again() -> None:
    room = _Room(1000)
    room.largest = 100
    admission = Admission(ControlLimits(), room.try_place)
    again = waiting("again", 500)
    again.passed = 16
    admission.enter(again, front=True)
    admission.enter(waiting("short"))

    assert room.granted == []
