"""Count the requests under way, so that shutting down can wait for them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from wire.errors import Draining


class Drain:
    """Owns the count of running requests and whether new ones are taken."""

    def __init__(self) -> None:
        self._active = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    @property
    def active(self) -> int:
        """Requests under way."""
        return self._active

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request while it runs. Raises Draining if no new ones are taken."""
        if self._draining:
            raise Draining("the server is shutting down")
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if self._active == 0:
                self._idle.set()

    def begin(self) -> None:
        """Take no new requests."""
        self._draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request runs; False if `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
