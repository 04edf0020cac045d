"""Limit the requests in flight: fewer while the server is busy, more again as it answers.

a busy answer  halves the limit, once for all requests that were in flight at that moment
an answer      raises the limit by one up to the last good limit; above it, only a full round of answers does
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from batch.backend import Answer

_BUSY = frozenset({429, 503, 504, 529})
"""Statuses of an overloaded server; 504: a request waited too long in its queue; 529: Anthropic's API."""


class Inflight:
    """Allows `maximum` requests at once, fewer while the server is busy. Owned by one event loop."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._limit = float(maximum)
        self._good = float(maximum)  # up to this value the limit grows fast again
        self._num_out = self._num_cuts = 0
        self._has_answered = True  # since the last cut
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        """How many requests are allowed at once now, from 1 to `maximum`."""
        return int(self._limit)

    async def run(self, send: Callable[[], Awaitable[Answer]]) -> Answer:
        """Await `send()` within the limit, and adapt the limit to the answer. Errors of `send` pass through."""
        await self._wait_for_slot()
        num_cuts = self._num_cuts
        try:
            answer = await send()
            self._learn(answer.status, num_cuts)
            return answer
        finally:
            self._num_out -= 1
            self._release()

    async def _wait_for_slot(self) -> None:
        while self._num_out >= self.limit:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                self._release()  # a slot that was already granted goes to the next request
                raise
        self._num_out += 1

    def _release(self) -> None:
        free = self.limit - self._num_out
        while free > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                free -= 1

    def _learn(self, status: int, num_cuts: int) -> None:
        """Adapt the limit; `num_cuts` is the number of cuts when the request was sent."""
        if num_cuts != self._num_cuts:
            return  # it was sent under a higher limit, so it shows nothing about the current one
        if status not in _BUSY:
            self._has_answered = True
            self._limit = min(self._maximum, self._limit + (1 if self._limit < self._good else 1 / self.limit))
            return
        self._num_cuts += 1
        self._limit = max(1.0, self._limit / 2)
        if self._has_answered:  # else the server is down, which shows nothing about its capacity
            self._has_answered, self._good = False, self._limit
