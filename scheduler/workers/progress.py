"""Whether a worker makes progress, from its counters and answers; our own instances report this themselves."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from wire.errors import HandoffFailed, InstanceLost, NoCapacity, PdserveError
from wire.load import LoadSnapshot
from wire.shared_limits import progress_limit

_FIRST_ANSWER_S = 15.0
"""The time allowed for the first prompt, for which some workers compile kernels."""
_IMAGES_S = 15.0
"""The expected time for the images of a chat; up to four times this may pass, as with an instance's --image-timeout."""
_MAX_STEP_S = 2.0
"""The most that one check adds to a silence: if more time has passed, this process itself could not run."""


class Leg(AbstractContextManager["Leg"]):
    """One request on the worker: how long it has been silent, and its `num_tokens` to compute or to fetch first.

    A leg that `receives` waits for another worker's prefill before its first answer; with `has_images`, images are also
    encoded before it. That answer must come before `until`, by the clock: later, decode may have read blocks that hold
    another prompt's KV. Until `reserved` is set, if given, the worker has not allocated blocks. Used as a `with` block
    in one task: if the request is ended, the block raises the reason.
    """

    def __init__(
        self, running: "set[Leg]", rates: deque[float], clock: Callable[[], float], num_tokens: int, *, receives: bool,
        has_images: bool = False, until: float | None = None, reserved: asyncio.Event | None = None,
    ) -> None:  # fmt: skip
        self.num_tokens = num_tokens
        self.receives = receives
        self.has_images = has_images
        self.until = until
        self.num_looks = 0
        self.silent_s = 0.0
        self._reserved = reserved
        self._running = running
        self._rates = rates
        self._clock = clock
        self._reason: PdserveError | None = None

    def __enter__(self) -> "Leg":
        """Start to watch."""
        task = asyncio.current_task()
        assert task is not None
        self._task, self._num_cancelled = task, task.cancelling()
        self._running.add(self)
        self._began = self._clock()
        return self

    def heard(self, num_cached: int = 0) -> None:
        """Record that a part of the answer arrived: nothing is left to compute before the next.

        Raises NoCapacity, or HandoffFailed with images, if it is the first and came too late.
        """
        if self.until is not None and self._clock() >= self.until:
            raise self._late()
        if self.num_tokens > num_cached and not self.has_images:
            seconds = self._clock() - self._began
            self._rates.append((self.num_tokens - num_cached) / max(1e-3, seconds))
        self.silent_s, self.num_tokens, self.receives, self.has_images, self.until = 0.0, 0, False, False, None

    @property
    def fetches(self) -> bool:
        """Whether it waits for its KV, with blocks: a worker that is not full allocates them before the second look."""
        return self.receives and (self.num_looks < 2 or self._reserved is None or self._reserved.is_set())

    def end(self) -> None:
        """End the request, which has been silent for too long. Idempotent."""
        self._end(InstanceLost(f"no answer for {self.silent_s:.1f} s (tokens to compute or fetch: {self.num_tokens})"))

    def end_late(self, now: float) -> None:
        """End the request if its first answer would come too late. Idempotent."""
        if self.until is not None and now >= self.until:
            self._end(self._late())

    def _end(self, reason: PdserveError) -> None:
        if self._reason is None:
            self._reason = reason
            self._task.cancel()

    def _late(self) -> PdserveError:
        if self.has_images:
            return HandoffFailed("the KV that it should have read was no longer held: the images took too long")
        return NoCapacity("it did not begin to answer while the KV that it should have read was held")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop watching. Raises the reason if the request was ended, unless its task was also cancelled."""
        self._running.discard(self)
        if self._reason and self._task.uncancel() <= self._num_cancelled and kind is asyncio.CancelledError:
            raise self._reason from None


class Progress:
    """Owner of the running requests and of when the worker's counters last moved. `steps`: their sum, -1 at first."""

    def __init__(self, clock: Callable[[], float], *, least_s: float = 8.5) -> None:
        """`least_s`: the shortest silence that ends a request, in seconds."""
        self._clock = clock
        self._least_s = least_s
        self.steps = -1
        self.prompts_recomputed = 0
        self._looked_at = self._moved_at = clock()
        self._full_at = 0  # sequences that ran when the worker last queued others, 0 once fewer run
        self._legs: set[Leg] = set()
        self._rates: deque[float] = deque(maxlen=32)

    def leg(
        self, num_tokens: int, *, receives: bool = False, has_images: bool = False, until: float | None = None,
        reserved: asyncio.Event | None = None,
    ) -> Leg:  # fmt: skip
        """Return one request to watch; its block raises why the request was ended: silence, or KV no longer held."""
        return Leg(
            self._legs, self._rates, self._clock, num_tokens, receives=receives, has_images=has_images, until=until,
            reserved=reserved,
        )  # fmt: skip

    def judged(self, load: LoadSnapshot, num_fetching: int | None = None) -> LoadSnapshot:
        """Return the load with the worker's progress as observed here; end the requests that the worker has lost.

        Silence means nothing while requests wait in the worker's queue or for another worker's prefill. Those that have
        blocks and wait for their KV (`num_fetching`, if the worker reports that) do not count as waiting here, although
        vLLM counts them: they do not show that slots or blocks are short.
        """
        now = self._clock()
        elapsed_s, self._looked_at = min(now - self._looked_at, _MAX_STEP_S), now
        receiving = sum(leg.receives for leg in self._legs)
        for leg in self._legs:
            leg.num_looks += 1
        fetching = sum(leg.fetches for leg in self._legs) if num_fetching is None else num_fetching
        waiting = max(0, load.waiting - fetching)
        if waiting or load.running < self._full_at:
            self._full_at = load.running if waiting else 0
        if load.steps != self.steps or load.running + load.waiting <= receiving:
            self.steps, self._moved_at = load.steps, now
        uncomputed = sum(leg.num_tokens for leg in self._legs)
        for leg in [*self._legs]:
            leg.end_late(now)
        expected_s = uncomputed / min(self._rates) if self._rates else _FIRST_ANSWER_S
        with_images_s = max(expected_s, _IMAGES_S)
        for leg in [leg for leg in self._legs if not (waiting or leg.receives)]:
            leg.silent_s += elapsed_s
            needs_s = with_images_s if leg.has_images else expected_s if leg.num_tokens else 0.0
            if leg.silent_s > progress_limit(needs_s, least_s=self._least_s):
                leg.end()
        unanswered = [leg for leg in self._legs if leg.num_tokens or leg.has_images]
        only_images = unanswered and all(leg.has_images for leg in unanswered)
        return dataclasses.replace(
            load,
            waiting=max(waiting, bool(self._full_at)),  # what it queued may be in the scheduler's queue again
            uncomputed_tokens=uncomputed,
            progress_age_s=now - self._moved_at,
            prompts_recomputed=self.prompts_recomputed,
            slowest_turn_s=with_images_s if only_images else expected_s,
        )
