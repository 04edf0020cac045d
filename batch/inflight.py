"""How many lines are asked at once: fewer while the server turns lines away, more again as it answers them.

a busy answer  half as many, once for all that were out at that moment
an answer      one more below the number that was well before, above it one more for as many answers as are out
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from batch.backend import Answer

_BUSY = frozenset({429, 503, 504})
"""Answers of a server that has more to do than it can: 504, because a line waited too long for its turn."""


class Inflight:
    """Lets out `most` questions at once, less where the server is busy. Owned by one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = float(most)
        self._well = float(most)  # the limit up to which it grows fast again
        self._num_out = self._num_cuts = 0
        self._has_answered = True  # since the last cut
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        """How many are let out at once now, from 1 to `most`."""
        return int(self._limit)

    async def ask(self, question: Callable[[], Awaitable[Answer]]) -> Answer:
        """Ask when it may go out, and learn from the answer. Raises what `question` raises."""
        await self._enter()
        num_cuts = self._num_cuts
        try:
            answer = await question()
            self._learn(answer.status, num_cuts)
            return answer
        finally:
            self._num_out -= 1
            self._let_out()

    async def _enter(self) -> None:
        while self._num_out >= self.limit:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                self._let_out()  # the turn may have come, and is another's now
                raise
        self._num_out += 1

    def _let_out(self) -> None:
        free = self.limit - self._num_out
        while free > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                free -= 1

    def _learn(self, status: int, num_cuts: int) -> None:
        """`num_cuts`: how many there had been when the question went out."""
        if num_cuts != self._num_cuts:
            return  # it went out among more, and says nothing of how many are well now
        if status not in _BUSY:
            self._has_answered = True
            self._limit = min(self._most, self._limit + (1 if self._limit < self._well else 1 / self.limit))
            return
        self._num_cuts += 1
        self._limit = max(1.0, self._limit / 2)
        if self._has_answered:  # else it is away, and that says nothing of how many it can take
            self._has_answered, self._well = False, self._limit
