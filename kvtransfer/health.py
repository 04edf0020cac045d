"""How the transports towards one peer fare: which is tried next, which rests, which may come back. Pure.

    good --failed--> resting 1 s, 2 s, 4 s ... 60 s --due--> tried in the background --ready--> good

A rest only orders: where nothing else works, a resting transport is tried all the same.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

FIRST_REST_S = 1.0
LONGEST_REST_S = 60.0


class Change(Enum):
    """What a link that became ready means for the peer."""

    NONE = "none"
    FALLBACK = "fallback"
    BACK = "back"


@dataclass(slots=True)
class _Fare:
    strikes: int = 0
    rests_until: float | None = None
    ready_at: float | None = None
    broke: bool = False  # it was ready and a link was lost, which says less than a dial that failed
    reason: str = ""


class Health:
    """Owner of what is known of the transports towards one peer, `names` best first. All are in reach until told."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = self._in_reach = tuple(names)
        self._fares = {name: _Fare() for name in names}
        self.used: str | None = None
        self.fallbacks = 0

    def reach(self, names: Collection[str]) -> None:
        """Only these are of use between the two."""
        self._in_reach = tuple(name for name in self._names if name in names)

    def order(self) -> tuple[str, ...]:
        """The names to try for a ticket that needs a link now: what is good, best first.

        Then what worked until a link was lost, then what could not be dialled; what rests least comes first in each.
        """
        return tuple(sorted(self._in_reach, key=self._doubt))

    def rests(self, name: str) -> bool:
        """Whether `name` failed since it was last ready."""
        return self._fares[name].rests_until is not None

    def reason(self, name: str) -> str:
        """Why `name` failed last, in words; empty for one that is good."""
        return self._fares[name].reason

    def failed(self, name: str, reason: str, now: float) -> None:
        """A dial over `name` failed, or a link over it was lost: it rests, twice as long as the last time.

        Several links lost at once are one failure; a link that held for the longest rest has atoned for older ones.
        """
        fare = self._fares[name]
        fare.reason = reason
        if fare.rests_until is not None and now < fare.rests_until:
            return
        if fare.ready_at is not None and now - fare.ready_at >= LONGEST_REST_S:
            fare.strikes = 0
        fare.broke, fare.ready_at = fare.ready_at is not None, None
        fare.rests_until = now + min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** min(fare.strikes, 16))
        fare.strikes += 1

    def ready(self, name: str, now: float) -> None:
        """A link over `name` is ready."""
        fare = self._fares[name]
        fare.rests_until, fare.reason = None, ""
        if fare.ready_at is None:
            fare.ready_at = now

    def use(self, name: str) -> Change:
        """New tickets go over `name` from now on; tell whether that is worse or better than before."""
        before, after = self._rank(self._in_reach[0] if self.used is None else self.used), self._rank(name)
        self.used = name
        if after > before:
            self.fallbacks += 1
            return Change.FALLBACK
        return Change.BACK if after < before else Change.NONE

    def due(self, now: float) -> str | None:
        """The best transport that is better than the one in use and whose rest is over."""
        for name in self._names[: 0 if self.used is None else self._rank(self.used)]:
            rests_until = self._fares[name].rests_until
            if rests_until is not None and now >= rests_until:
                return name
        return None

    def forgive(self) -> None:
        """Nothing works: it is the peer or the way to it, and no transport's fault."""
        for fare in self._fares.values():
            fare.strikes, fare.rests_until, fare.ready_at = 0, None, None

    def _doubt(self, name: str) -> tuple[int, float]:
        fare = self._fares[name]
        return (0, 0.0) if fare.rests_until is None else (1 if fare.broke else 2, fare.rests_until)

    def _rank(self, name: str) -> int:
        return self._names.index(name)
