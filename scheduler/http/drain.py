"""Count running requests, so that shutdown can wait for them."""

import asyncio

from wire.errors import Draining


class Drain:
    """Owner of the count of running requests and of whether new ones are accepted."""

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
        """Number of running requests."""
        return self._active

    def __enter__(self) -> None:
        """Count one request while it runs. Raises Draining if no new ones are accepted."""
        if self._draining:
            raise Draining("the server is shutting down")
        self._active += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        """Stop counting it."""
        self._active -= 1
        if self._active == 0:
            self._idle.set()

    def begin(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request runs; False if `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
