"""A cache bounded by bytes: the least recently used entries are evicted. Pure; the owner locks the cache."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
_ENTRY_BYTES = 512
"""What an entry costs besides its value."""


class ByteCache(Generic[K, V]):
    """Embeddings by digest, or files by name. Mutable."""

    def __init__(self, limit_bytes: int, size_of: Callable[[V], int]) -> None:
        self._limit_bytes, self._size_of = limit_bytes, size_of
        self._entries: OrderedDict[K, V] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def find(self, key: K) -> V | None:
        """Return an entry and mark it as most recently used."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def keep(self, key: K, value: V) -> None:
        """Keep a value unless it alone exceeds the limit, in place of the key's earlier one; evict as needed."""
        if self._cost(value) > self._limit_bytes:
            return
        earlier = self._entries.pop(key, None)
        self.num_bytes += self._cost(value) - (0 if earlier is None else self._cost(earlier))
        self._entries[key] = value
        while self.num_bytes > self._limit_bytes:
            _, evicted = self._entries.popitem(last=False)
            self.num_bytes -= self._cost(evicted)

    def _cost(self, value: V) -> int:
        return self._size_of(value) + _ENTRY_BYTES
