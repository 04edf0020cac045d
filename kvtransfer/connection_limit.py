"""Who may wait at a receiver's door, and how many are inside: strangers must not keep those out who belong here.

accepted -> waiting (its greeting is under way) -> inside (what it is was proven)
               |
               +-> gave way to a later one: the oldest of its address, or the oldest of all
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from wire.errors import Unavailable

MAX_INSIDE = 1_024
MAX_WAITING = 64
MAX_WAITING_OF_ADDRESS = 16


@dataclass(frozen=True, slots=True)
class _Waiting:
    address: str | None
    give_way: Callable[[], None]


class ConnectionLimit:
    """Owner of the two counts, under a lock that nothing is called in. Connections are told apart by their number."""

    def __init__(
        self, *, max_inside: int = MAX_INSIDE, max_waiting: int = MAX_WAITING,
        max_waiting_of_address: int = MAX_WAITING_OF_ADDRESS,
    ) -> None:  # fmt: skip
        self._max_inside, self._max_waiting, self._max_of_address = max_inside, max_waiting, max_waiting_of_address
        self._waiting: dict[int, _Waiting] = {}  # in the order they came
        self._inside: set[int] = set()
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Connections not yet greeted that have not given way."""
        return len(self._waiting)

    def wait(self, number: int, address: str | None, give_way: Callable[[], None]) -> None:
        """Let a connection wait; `give_way` ends it, from any thread and without waiting.

        An `address` of None is bounded with all others only: it is known for one of this host's own.
        """
        with self._lock:
            displaced = self._oldest_in_the_way(address)
            gone = None if displaced is None else self._waiting.pop(displaced)
            self._waiting[number] = _Waiting(address, give_way)
        if gone is not None:
            gone.give_way()

    def enter(self, number: int) -> None:
        """A waiting connection was greeted. Raises Unavailable, with the limit, where it gave way or all is full."""
        with self._lock:
            if number not in self._waiting:
                raise Unavailable(f"the link gave way: {self._max_waiting} later ones waited to be greeted")
            if len(self._inside) >= self._max_inside:
                raise Unavailable(f"{len(self._inside)} KV links are here, the limit is {self._max_inside}")
            del self._waiting[number]
            self._inside.add(number)

    def leave(self, number: int) -> None:
        """A connection is over, wherever it stood. Idempotent."""
        with self._lock:
            self._waiting.pop(number, None)
            self._inside.discard(number)

    def _oldest_in_the_way(self, address: str | None) -> int | None:
        if address is not None:
            those = [number for number, one in self._waiting.items() if one.address == address]
            if len(those) >= self._max_of_address:
                return those[0]
        return next(iter(self._waiting)) if len(self._waiting) >= self._max_waiting else None
