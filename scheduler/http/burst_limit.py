"""Lets a few requests begin at a time, then the event loop turn for others: a burst holds up no message of an instance.

A turn handles all that is ready. Thousands of requests that come at once would else be one turn of seconds, in which no
token moves on and instances that answered long ago seem to be silent. A message of an instance takes a few turns each.
"""

import asyncio
from collections import deque

_AT_ONCE = 4
_EVERY_TURNS = 4


class BurstLimit:
    """Owns those that wait to begin, first come, first served: `at_once` in every so many turns."""

    def __init__(self, at_once: int = _AT_ONCE, every_turns: int = _EVERY_TURNS) -> None:
        self._at_once = at_once
        self._every_turns = every_turns
        self._left = at_once
        self._turns_to_go = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return at once where there is room, else in one of the next turns."""
        if not self._turns_to_go:
            self._begin()
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _begin(self) -> None:
        self._turns_to_go = self._every_turns
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Count a turn; after so many let the next ones in, and go on as long as any come."""
        self._turns_to_go -= 1
        if self._turns_to_go:
            asyncio.get_running_loop().call_soon(self._turn)
            return
        self._left = self._at_once
        if self._waiting:
            self._begin()
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # else its client went away meanwhile
                turn.set_result(None)
                self._left -= 1
