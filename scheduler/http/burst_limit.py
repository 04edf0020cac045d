"""Starts a few requests at a time, so that a burst does not delay messages from instances on the event loop.

One turn of the event loop handles everything that is ready. Thousands of simultaneous requests would make a turn last
seconds, in which no token is forwarded and instances seem silent. A message from an instance takes a few turns.
"""

import asyncio
from collections import deque

_AT_ONCE = 4
_EVERY_TURNS = 4


class BurstLimit:
    """Owner of the queue of requests to start, first come, first served: `at_once` per `every_turns` turns."""

    def __init__(self, at_once: int = _AT_ONCE, every_turns: int = _EVERY_TURNS) -> None:
        self._at_once = at_once
        self._every_turns = every_turns
        self._left = at_once
        self._turns_to_go = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return immediately if there is room, else in one of the next turns."""
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
        asyncio.get_running_loop().call_soon(self._wait_for_turn)

    def _wait_for_turn(self) -> None:
        """Count a turn; after `every_turns` start the next requests, and repeat while any are waiting."""
        self._turns_to_go -= 1
        if self._turns_to_go:
            asyncio.get_running_loop().call_soon(self._wait_for_turn)
            return
        self._left = self._at_once
        if self._waiting:
            self._begin()
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # else its client has disconnected
                turn.set_result(None)
                self._left -= 1
