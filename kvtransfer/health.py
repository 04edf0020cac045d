"""State of the transports to one peer: which to try next, which to rest after a failure, which to return to. Pure.

    good --failed--> resting 1 s, 2 s, 4 s ... 60 s --due--> tried in the background --ready--> good

A rest only lowers the priority: if nothing else works, a resting transport is tried all the same.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

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


class Health:
    """Owner of the state of the transports to one peer, `names` best first. All count as reachable until `reach`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = self._in_reach = tuple(names)
        self._states = {name: _TransportState() for name in names}
        self.used: str | None = None
        self.fallbacks = 0

    def reach(self, names: Collection[str]) -> None:
        """Restrict the transports to these: the others cannot reach the peer."""
        self._in_reach = tuple(name for name in self._names if name in names)

    def order(self) -> tuple[str, ...]:
        """Return the names in the order to try them for a ticket that needs a link now: good ones, best first.

        Then those that worked until a link was lost, then those whose dial failed; the first to be due leads in each.
        """
        return tuple(sorted(self._in_reach, key=self._try_order))

    def rests(self, name: str) -> bool:
        """Return whether `name` has failed since it was last ready."""
        return self._states[name].rests_until is not None

    def reason(self, name: str) -> str:
        """Return the message of the last failure of `name`; empty if it is good."""
        return self._states[name].reason

    def failed(self, name: str, reason: str, now: float) -> None:
        """Record a failed dial or a lost link of `name`: it rests, twice as long as the last time.

        Several links lost at once count once; a link that lasted for the longest rest clears older failures.
        """
        state = self._states[name]
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

    def wait_for(self, name: str, meanwhile: str, now: float) -> None:
        """Record that no ticket waits for `name`, whose set-up is slow: it is due once a worse transport is used.

        `meanwhile` is the transport for the tickets until then.
        """
        state = self._states[name]
        if state.rests_until is None:
            state.rests_until, state.reason = now, "its link is being set up"
            if self._rank(name) < self._rank(meanwhile):
                self.used = meanwhile

    def use(self, name: str) -> Change:
        """Send new tickets over `name` from now on; return whether it is worse or better than the one before."""
        before, after = self._rank(self._in_reach[0] if self.used is None else self.used), self._rank(name)
        self.used = name
        if after > before:
            self.fallbacks += 1
            return Change.FALLBACK
        return Change.BACK if after < before else Change.NONE

    def due(self, now: float) -> str | None:
        """Return the best transport that is better than the one in use and whose rest is over, or None."""
        for name in self._names[: 0 if self.used is None else self._rank(self.used)]:
            rests_until = self._states[name].rests_until
            if rests_until is not None and now >= rests_until:
                return name
        return None

    def forgive(self) -> None:
        """Clear all failures: if nothing works, the peer or the network has failed rather than a transport."""
        for state in self._states.values():
            state.num_failures, state.rests_until, state.ready_at = 0, None, None

    def _try_order(self, name: str) -> tuple[int, float]:
        state = self._states[name]
        return (0, 0.0) if state.rests_until is None else (1 if state.broke else 2, state.rests_until)

    def _rank(self, name: str) -> int:
        return self._names.index(name)
