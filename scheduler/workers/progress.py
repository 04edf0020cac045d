"""Whether a worker makes progress, from its counters and answers; our own instances report this themselves."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from wire.errors import InstanceLost
from wire.load import LoadSnapshot
from wire.shared_limits import progress_limit

_FIRST_ANSWER_S = 15.0
"""The time allowed for the first prompt: some workers compile kernels then."""
_MAX_STEP_S = 2.0
"""The most that one check adds to a silence: if more time has passed, this process could not run in between."""


class Leg:
    """One request on the worker: for how long it has been silent, and its `num_tokens` to compute or to fetch first.

    One that `receives` waits for another worker's prefill until its first answer.
    """

    def __init__(
        self, num_tokens: int, scope: asyncio.Timeout, rates: deque[float], *, receives: bool = False
    ) -> None:  # fmt: skip
        self.num_tokens = num_tokens
        self.receives = receives
        self.silent_s = 0.0
        self._scope = scope
        self._rates = rates
        self._began = asyncio.get_running_loop().time()

    def heard(self, num_cached: int = 0) -> None:
        """Record that a part of the answer arrived: nothing is left to compute before the next."""
        if self.num_tokens > num_cached:
            seconds = asyncio.get_running_loop().time() - self._began
            self._rates.append((self.num_tokens - num_cached) / max(1e-3, seconds))
        self.silent_s, self.num_tokens, self.receives = 0.0, 0, False

    def end(self, now: float) -> None:
        """End the request: it has been silent for too long."""
        self._scope.reschedule(now)


class Progress:
    """Owner of the running requests and the counters' last movement. `steps` is their last sum, -1 before it."""

    def __init__(self, clock: Callable[[], float], *, least_s: float = 8.5) -> None:
        """`least_s`: the shortest silence that ends a request, in seconds."""
        self._clock = clock
        self._least_s = least_s
        self.steps = -1
        self.prompts_recomputed = 0
        self._looked_at = self._moved_at = clock()
        self._legs: set[Leg] = set()
        self._rates: deque[float] = deque(maxlen=32)

    @asynccontextmanager
    async def leg(self, num_tokens: int, *, receives: bool = False) -> AsyncIterator[Leg]:
        """Watch one request. Raises InstanceLost if the worker is silent for too long."""
        leg = None
        try:
            async with asyncio.timeout(None) as scope:
                leg = Leg(num_tokens, scope, self._rates, receives=receives)
                self._legs.add(leg)
                yield leg
        except TimeoutError:
            assert leg is not None
            raise InstanceLost(
                f"no answer for {leg.silent_s:.1f} s, {leg.num_tokens} tokens to compute or fetch"
            ) from None
        finally:
            if leg is not None:
                self._legs.discard(leg)

    def judged(self, load: LoadSnapshot) -> LoadSnapshot:
        """Return the load with this side's view of the worker's progress; end the requests that it has lost.

        While requests wait there, or for another worker's prefill, silence means nothing. The latter do not count as
        waiting here, although vLLM counts them: they show nothing about free blocks or the other requests.
        """
        now = self._clock()
        elapsed_s, self._looked_at = min(now - self._looked_at, _MAX_STEP_S), now
        receiving = sum(leg.receives for leg in self._legs)
        waiting = max(0, load.waiting - receiving)
        if load.steps != self.steps or load.running + load.waiting <= receiving:
            self.steps, self._moved_at = load.steps, now
        uncomputed = sum(leg.num_tokens for leg in self._legs)
        expected_s = uncomputed / min(self._rates) if self._rates else _FIRST_ANSWER_S
        for leg in [leg for leg in self._legs if not (waiting or leg.receives)]:
            leg.silent_s += elapsed_s
            if leg.silent_s > progress_limit(expected_s if leg.num_tokens else 0.0, least_s=self._least_s):
                leg.end(now)
        return dataclasses.replace(
            load,
            waiting=waiting,
            uncomputed_tokens=uncomputed,
            progress_age_s=now - self._moved_at,
            prompts_recomputed=self.prompts_recomputed,
            slowest_turn_s=expected_s,
        )
