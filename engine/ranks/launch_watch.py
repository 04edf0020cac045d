"""Ends a launch that waits on the device for another rank: a launch blocks while the device's queue is full.

launch --queue is full--> waits for a sum --another rank is lost--> the sums are aborted
   |                                 |
   +------ takes too long -----------+--> tiny op on the device --done--> it is the host that takes long: continue
                                                 +--late--> the sums are aborted
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from devices.liveness import LivenessCheck, check_periodically
from engine.ranks.stream_sum import StreamSum
from native.ticker import run_time

_POLL_S = 0.5


class LaunchWatch:
    """Watches rank 0's launches, copies and captures. Owns a thread, which ends soon after the watch is deleted."""

    def __init__(
        self, sums: StreamSum, explain: Callable[[str], Exception], clock: Callable[[], float] = run_time
    ) -> None:
        """`explain` ends the instance for a reason, and returns the error. Allocates a few bytes on the device."""
        self._touch = LivenessCheck(sums.device)
        self._sums, self._explain, self._clock = sums, explain, clock
        self._since: float | None = None  # when the current call began; None if there is none
        self._most_s: float | None = None
        check_periodically(self, min(_POLL_S, sums.step_s / 4), "rank-launches")

    @contextmanager
    def guard(self, most_s: float | None = None) -> Iterator[None]:
        """Bound the time of a call that uses the device; once the sums are aborted, the call raises its own error.

        A call may take `most_s`; if that is None, a step's limit, and longer while the device works.
        """
        self._most_s, self._since = most_s, self._clock()
        try:
            yield
        finally:
            self._since = None

    def check(self) -> bool:
        """Abort the sums if the current call has waited for them too long; return whether the sums still run."""
        since, sums = self._since, self._sums
        if since is None:
            return True
        limit_s = sums.step_s if self._most_s is None else self._most_s
        if sums.is_aborted:
            reason = "another rank is lost"
        elif self._clock() - since <= limit_s or (self._most_s is None and self._touch.why_not(limit_s) is None):
            return True
        else:
            reason = f"no sum over the ranks within {limit_s:g} s"
        self._explain(str(sums.fail(reason)))
        return False
