"""State of the transports to one peer: which to try next, which to rest after a failure, which to return to. Pure.

    good --failed--> resting 1 s, 2 s, 4 s ... 60 s --due--> tried in the background --ready--> good
         --slower--> not due while the faster or a better transport is used; forgotten when a link over either is lost

Transports better than the one in use are due. While one that must be measured first is in use, all others are due: its
place in the order says nothing about its rate.

A rest only lowers the priority: if nothing else works, a resting transport is tried all the same.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from wire.link_reasons import IN_SET_UP, UNMEASURED

FIRST_REST_S = 1.0
LONGEST_REST_S = 60.0


class Change(Enum):
    """How a link that became ready changes the transport used to the peer."""

    NONE = "none"
    FALLBACK = "fallback"
    BACK = "back"


@dataclass(slots=True)
class _TransportState:
    num_failures: int = 0
    rests_until: float | None = None
    ready_at: float | None = None
    broke: bool = False  # a link was lost after it was ready: less serious than a failed dial
    reason: str = ""
    slower: tuple[str, str] | None = None  # the faster transport, and both rates as text


class Health:
    """Owner of the state of the transports to one peer, `names` best first. All count as reachable until `reach`.

    Those in `measured_first` are due after all others, so that they are measured against the best of the others.
    """

    def __init__(self, names: Sequence[str], measured_first: Collection[str] = ()) -> None:
        self._names = self._in_reach = tuple(names)
        self._measured_first = frozenset(measured_first)
        self._states = {name: _TransportState() for name in names}
        self.used: str | None = None
        self.fallbacks = 0

    def reach(self, names: Collection[str]) -> None:
        """Restrict the transports to these: the others cannot reach the peer."""
        self._in_reach = tuple(name for name in self._names if name in names)

    def order(self) -> tuple[str, ...]:
        """Return the names in the order to try them for a ticket that needs a link now.

        First the good ones, best first, then those that worked until a link was lost, then those
        whose dial failed; in the last two groups, the one due earliest comes first.
        """
        return tuple(sorted(self._in_reach, key=self._try_order))

    def rests(self, name: str) -> bool:
        """Return whether `name` has failed since it was last ready."""
        return self._states[name].rests_until is not None

    def reason(self, name: str) -> str:
        """Return the message of the last failure of `name`, or both rates if it is slower; empty if it is good."""
        state = self._states[name]
        return state.reason if state.slower is None else state.slower[1]

    def failed(self, name: str, reason: str, now: float) -> None:
        """Record a failed dial or a lost link of `name`: it rests, twice as long as the last time.

        Several links lost at once count once; a link that lasted as long as the longest rest clears older failures.
        """
        state = self._states[name]
        self._forget_rates(name)
        state.reason = reason
        if state.rests_until is not None and now < state.rests_until:
            return
        if state.ready_at is not None and now - state.ready_at >= LONGEST_REST_S:
            state.num_failures = 0
        state.broke, state.ready_at = state.ready_at is not None, None
        state.rests_until = now + min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** min(state.num_failures, 16))
        state.num_failures += 1

    def ready(self, name: str, now: float) -> None:
        """Record that a link over `name` is ready."""
        state = self._states[name]
        state.rests_until, state.reason = None, ""
        if state.ready_at is None:
            state.ready_at = now

    def slower(self, name: str, than: str, reason: str, now: float) -> None:
        """Record that `name` was measured to be slower than `than`; `reason` has both rates.

        If `name` is the better of the two by order, it is measured again, but not before the longest rest has passed.
        """
        state = self._states[name]
        state.slower = than, reason
        if self._rank_of(name) < self._rank_of(than):
            state.rests_until, state.reason = now + LONGEST_REST_S, UNMEASURED

    def is_slower(self, name: str, than: str) -> bool:
        """Return whether `name` was measured to be slower than `than`, on links that have not been lost since."""
        slower = self._states[name].slower
        return slower is not None and slower[0] == than

    def wait_for(self, name: str, meanwhile: str, now: float) -> None:
        """Record that no ticket waits for `name`, whose set-up is slow: it is due once a worse transport is used.

        `meanwhile` is the transport for the tickets until then.
        """
        state = self._states[name]
        if state.rests_until is None:
            state.rests_until, state.reason = now, UNMEASURED if name in self._measured_first else IN_SET_UP
            if self._rank_of(name) < self._rank_of(meanwhile):
                self.used = meanwhile

    def use(self, name: str) -> Change:
        """Send new tickets over `name` from now on; return whether it is worse or better than the one before.

        A transport that was measured to be faster does not count as worse.
        """
        before, after = self._rank_of(self._in_reach[0] if self.used is None else self.used), self._rank_of(name)
        is_slower = self.used is not None and self.is_slower(self.used, name)
        self.used, self._states[name].slower = name, None
        if after > before and is_slower:
            return Change.NONE
        if after > before:
            self.fallbacks += 1
            return Change.FALLBACK
        return Change.BACK if after < before else Change.NONE

    def due(self, now: float) -> str | None:
        """Return the best transport whose rest is over, to try in addition to the one in use, or None."""
        tried = self._names[: 0 if self.used is None else self._rank_of(self.used)]
        if self.used in self._measured_first:
            tried = self._names
        due = [name for name in tried if name != self.used and self._is_due(name, now)]
        return min(due, key=lambda name: name in self._measured_first, default=None)

    def forgive(self) -> None:
        """Clear all failures: if nothing works, the peer or the network has failed rather than a transport."""
        for name, state in self._states.items():
            self._forget_rates(name)
            state.num_failures, state.rests_until, state.ready_at = 0, None, None

    def _is_due(self, name: str, now: float) -> bool:
        state = self._states[name]
        if state.rests_until is None or now < state.rests_until or self.used is None:
            return False
        return state.slower is None or self._rank_of(state.slower[0]) < self._rank_of(self.used)

    def _forget_rates(self, name: str) -> None:
        """Forget the measurements that compared `name`: its link is lost."""
        for one, state in self._states.items():
            if state.slower is not None and name in (one, state.slower[0]):
                state.slower = None

    def _try_order(self, name: str) -> tuple[int, float]:
        state = self._states[name]
        return (0, 0.0) if state.rests_until is None else (1 if state.broke else 2, state.rests_until)

    def _rank_of(self, name: str) -> int:
        return self._names.index(name)
