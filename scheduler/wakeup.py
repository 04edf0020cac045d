"""A wait for a change, with a deadline that moves without touching a timer."""

import asyncio
from collections.abc import Callable


class Wakeup:
    """Wakes the one task that waits. Waits share one timer, which reads the deadline only when it fires."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: Callable[[], float] = float

    async def wait(self, deadline: Callable[[], float]) -> None:
        """Wait for `set`. Raises TimeoutError when the loop's clock reaches what `deadline` then returns."""
        loop, due = asyncio.get_running_loop(), deadline()
        if self._timer is None or self._timer.when() > due:
            self.stop_timer()
            self._timer = loop.call_at(due, self._on_timer)
        self._deadline, self._waiter = deadline, loop.create_future()
        await self._waiter

    def set(self) -> None:
        """Wake the waiting task, if any."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def stop_timer(self) -> None:
        """Stop the timer after the last wait, and drop the deadline, whose owner refers to this object."""
        self._deadline = float
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        loop, due = asyncio.get_running_loop(), self._deadline()
        if loop.time() < due:
            self._timer = loop.call_at(due, self._on_timer)
        else:
            waiter.set_exception(TimeoutError())
