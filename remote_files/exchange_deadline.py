"""The deadline of one exchange, extended by each sign of progress."""

import asyncio
from types import TracebackType
from typing import Self


class ExchangeDeadline:
    """Ends its `async with` block with TimeoutError if the expected event does not occur; owned by one exchange."""

    def __init__(self, what: str, seconds: float) -> None:
        self._timeout = asyncio.timeout(None)
        self.expected = what
        self._seconds = seconds

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self.expect(self.expected, self._seconds)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._timeout.__aexit__(kind, error, trace)

    def expect(self, what: str, seconds: float) -> None:
        """Expect `what` within `seconds` from now."""
        self.expected = what
        self._seconds = seconds
        self._timeout.reschedule(asyncio.get_running_loop().time() + seconds)

    def __str__(self) -> str:
        return f"no {self.expected} within {self._seconds:g} s"
