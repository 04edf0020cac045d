"""Limits concurrent retries of the cluster to a share of the active requests, plus a few per minute in any case.

Otherwise a fault that hits many requests would double the load of the remaining instances. Retries over the budget wait
first come, first served, until their prompt's deadline. If no prompt is queued, there is no such load: then one retry
over the budget may run at a time, and the next one once the first has its grant.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from scheduler.limits import ControlLimits


class RetryBudget:
    """Owner of the running and waiting retries.

    `num_active` returns the number of accepted, unfinished requests, `has_room` whether the cluster's queue is empty.

    A retry counts until its decode instance sends a token or the retry ends, for `retry_window_s` at most: so
    `min_retries` can start in every window even if all of them hang.
    """

    def __init__(self, limits: ControlLimits, num_active: Callable[[], int], has_room: Callable[[], bool]) -> None:
        self._limits = limits
        self._num_active, self._has_room = num_active, has_room
        self._past_limit: Retry | None = None  # admitted because there is room, not placed yet
        self._under_way: dict[Retry, asyncio.TimerHandle] = {}
        self._waiting: deque[tuple[Retry, asyncio.Future[None]]] = deque()

    @property
    def limit(self) -> int:
        """The current limit on concurrent retries."""
        return max(self._limits.min_retries, int(self._limits.retry_share * self._num_active()))

    @property
    def num_under_way(self) -> int:
        """Number of retries that count now."""
        return len(self._under_way)

    @property
    def num_waiting(self) -> int:
        """Number of waiting retries."""
        return len(self._waiting)

    @property
    def is_spent(self) -> bool:
        """Whether a new retry would wait."""
        return bool(self._waiting) or not self._may_go()

    def retry(self) -> "Retry":
        """Return a prompt's handle for retries."""
        return Retry(self)

    async def take(self, retry: "Retry") -> None:
        """Wait for the turn of `retry` and count it as running."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((retry, turn))
        self._start_waiting()
        try:
            await turn
        except asyncio.CancelledError:
            self.give_back(retry)
            raise

    def placed(self, retry: "Retry") -> None:
        """Record that `retry` has its grant: there may be room for the next."""
        if self._past_limit is retry:
            self._past_limit = None
        self._start_waiting()

    def give_back(self, retry: "Retry") -> None:
        """Stop counting `retry`, running or waiting. Idempotent."""
        forget = self._under_way.pop(retry, None)
        if forget is not None:
            forget.cancel()
        self._waiting = deque(waits for waits in self._waiting if waits[0] is not retry)
        self.placed(retry)

    def _may_go(self) -> bool:
        return self.num_under_way < self.limit or (self._past_limit is None and self._has_room())

    def _start_waiting(self) -> None:
        while self._waiting and self._may_go():
            retry, turn = self._waiting.popleft()
            if turn.done():  # cancelled while waiting; its task has yet to remove it
                continue
            if self.num_under_way >= self.limit:
                self._past_limit = retry
            forget = asyncio.get_running_loop().call_later(self._limits.retry_window_s, self.give_back, retry)
            self._under_way[retry] = forget
            turn.set_result(None)


class Retry(AbstractContextManager["Retry"]):
    """One prompt's place in the budget, occupied while a retry of it is running; released on exit."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self._was_begun = False

    async def begin(self) -> None:
        """Wait until the budget has room for this retry."""
        self._was_begun = True
        await self._budget.take(self)

    def placed(self) -> None:
        """Record that the retry has its grant."""
        self._budget.placed(self)

    def done(self) -> None:
        """Release the place after the retry succeeded or ended. Idempotent.

        Most prompts are never retried and occupy no place, but their end may leave room for a waiting retry.
        """
        if self._was_begun or self._budget.num_waiting:
            self._budget.give_back(self)

    def __exit__(self, *exc: object) -> None:
        """Release the place."""
        self.done()
