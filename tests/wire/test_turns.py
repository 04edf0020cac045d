"""The turns of schedulers at a full pool: first come first served, and none is held for ever."""

from dataclasses import dataclass

from wire.messages import Event
from wire.turns import TURN_S, Turns


@dataclass(frozen=True)
class Owner:
    name: str
    ended: bool = False

    def emit(self, event: Event) -> None:
        """Not used here."""


A, B, C = map(Owner, "abc")


def test_one_scheduler_alone_never_waits_for_a_turn() -> None:
    turns = Turns()
    for now in range(3):
        turns.wait(A)
        assert turns.may_take(A, now)
    assert not turns.leave(A)


def test_the_first_that_was_refused_is_the_next() -> None:
    turns = Turns()
    turns.wait(B)
    turns.wait(A)
    assert (turns.may_take(A, 0.0), turns.may_take(C, 0.0), turns.may_take(B, 0.0)) == (False, False, True)
    assert turns.leave(B), "A waits"
    assert (turns.may_take(B, 0.0), turns.may_take(A, 0.0)) == (False, True)


def test_a_turn_that_is_not_used_lapses_once_others_need_it() -> None:
    turns = Turns()
    turns.wait(B)
    turns.wait(C)
    assert not turns.may_take(A, 100.0), "its time begins with the first that is refused for it"
    assert not turns.may_take(A, 100.0 + TURN_S)
    assert not turns.may_take(A, 100.1 + TURN_S), "now C is the next"
    assert turns.may_take(A, 100.2 + 2 * TURN_S)


def test_a_scheduler_that_is_gone_holds_no_turn() -> None:
    turns = Turns()
    turns.wait(B)
    assert not turns.may_take(A, 0.0)
    turns.leave(B)
    assert turns.may_take(A, 0.0)
