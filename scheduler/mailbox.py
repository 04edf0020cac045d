"""A queue for one task, which takes all waiting items at once."""

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Owner of the items not yet taken. For one reader and without a size limit, so cheaper than asyncio.Queue."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        """Add an item without waiting."""
        self._items.append(item)
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def take(self) -> list[T]:
        """Return all items, in order; wait for the first one."""
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        items, self._items = self._items, []
        return items
