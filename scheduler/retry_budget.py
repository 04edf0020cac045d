"""How many retries the cluster makes at once: a share of the active requests, and a few a minute whatever their number.

A fault that hits many requests would else double the load of what is left. Retries past the budget wait their turn,
first come first served; each prompt's own limit ends the wait. Where nobody waits for room, there is no such load: then
one past the budget goes on at a time, and the next when it has its grant.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from scheduler.limits import ControlLimits


class RetryBudget:
    """Owns the retries under way and those that wait.

    `num_active` returns the requests accepted and not ended, `has_room` whether the cluster's queue is empty.

    A retry counts until its decode instance gives a token, until it ends, and for `retry_window_s` at most: so
    `min_retries` start in every window even where all of them hang.
    """

    def __init__(self, limits: ControlLimits, num_active: Callable[[], int], has_room: Callable[[], bool]) -> None:
        self._limits = limits
        self._num_active, self._has_room = num_active, has_room
        self._past_limit: Retry | None = None  # which went on because there is room, and is not placed yet
        self._under_way: dict[Retry, asyncio.TimerHandle] = {}
        self._waiting: deque[tuple[Retry, asyncio.Future[None]]] = deque()

    @property
    def limit(self) -> int:
        """The most retries under way at once, now."""
        return max(self._limits.min_retries, int(self._limits.retry_share * self._num_active()))

    @property
    def num_under_way(self) -> int:
        """Retries that count now."""
        return len(self._under_way)

    @property
    def num_waiting(self) -> int:
        """Retries that wait their turn."""
        return len(self._waiting)

    @property
    def is_spent(self) -> bool:
        """Whether a retry asked for now would wait."""
        return bool(self._waiting) or not self._may_go()

    def retry(self) -> "Retry":
        """Return a prompt's way to retries."""
        return Retry(self)

    async def take(self, retry: "Retry") -> None:
        """Count `retry` as under way, in its turn."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((retry, turn))
        self._pump()
        try:
            await turn
        except asyncio.CancelledError:
            self.give_back(retry)
            raise

    def give_up(self, retry: "Retry") -> None:
        """Cancel the wait of `retry`, if it waits."""
        for waits, turn in self._waiting:
            if waits is retry:
                turn.cancel()

    def placed(self, retry: "Retry") -> None:
        """`retry` has its grant: there may be room for the next."""
        if self._past_limit is retry:
            self._past_limit = None
        self._pump()

    def give_back(self, retry: "Retry") -> None:
        """Count `retry` no more, whether it is under way or waits. Idempotent."""
        forget = self._under_way.pop(retry, None)
        if forget is not None:
            forget.cancel()
        self._waiting = deque(waits for waits in self._waiting if waits[0] is not retry)
        self.placed(retry)

    def _may_go(self) -> bool:
        return self.num_under_way < self.limit or (self._past_limit is None and self._has_room())

    def _pump(self) -> None:
        while self._waiting and self._may_go():
            retry, turn = self._waiting.popleft()
            if turn.done():  # cancelled while it waited; its task has yet to run and leave
                continue
            if self.num_under_way >= self.limit:
                self._past_limit = retry
            forget = asyncio.get_running_loop().call_later(self._limits.retry_window_s, self.give_back, retry)
            self._under_way[retry] = forget
            turn.set_result(None)


class Retry(AbstractContextManager["Retry"]):
    """One prompt's place in the budget, held while a retry of it is under way; given back on leaving."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget

    async def begin(self) -> None:
        """Wait until the budget has room for one more."""
        await self._budget.take(self)

    def give_up(self) -> None:
        """Cancel the wait of `begin`."""
        self._budget.give_up(self)

    def placed(self) -> None:
        """It has its grant."""
        self._budget.placed(self)

    def done(self) -> None:
        """It has succeeded, or ended. Idempotent."""
        self._budget.give_back(self)

    def __exit__(self, *exc: object) -> None:
        """Give the place back."""
        self.done()
