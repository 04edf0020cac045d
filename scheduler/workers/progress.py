"""Whether a worker's engine progresses, judged from its counters: what an instance of ours says of itself."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from wire.load import LoadSnapshot

_SLOWEST_RATE = 50.0
"""Prompt tokens a second, until a prompt was computed: a slow CPU worker has more."""


class Progress:
    """Owner of the counters' last movement and the prompts being computed. `steps` is their last sum, -1 before it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.steps = -1
        self.prompts_recomputed = 0
        self._moved_at = clock()
        self._uncomputed = 0
        self._rate = _SLOWEST_RATE

    @contextmanager
    def prefilling(self, num_tokens: int) -> Iterator[None]:
        """Count a prompt as uncomputed, and measure its rate."""
        began = self._clock()
        self._uncomputed += num_tokens
        try:
            yield
            if num_tokens:
                self._moved_at = self._clock()
                self._rate = min(1e6, max(_SLOWEST_RATE, num_tokens / max(1e-3, self._moved_at - began)))
        finally:
            self._uncomputed -= num_tokens

    def judged(self, load: LoadSnapshot) -> LoadSnapshot:
        """Return the load with what this side knows of the worker's progress."""
        now = self._clock()
        if load.steps != self.steps or not (load.running or load.waiting):
            self.steps, self._moved_at = load.steps, now
        return dataclasses.replace(
            load,
            uncomputed_tokens=self._uncomputed,
            progress_age_s=now - self._moved_at,
            prompts_recomputed=self.prompts_recomputed,
            slowest_turn_s=self._uncomputed / self._rate,
        )
