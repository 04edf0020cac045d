"""Limits on a receiver's connections: unproven ones must not keep the cluster's own peers out.

accepted -> waiting (its handshake is in progress) -> inside (its identity is proven)
               |
               +-> displaced by a later connection, if this is the oldest from its address, or the oldest of all
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
    """Owner of both sets of connections, keyed by number, under a lock that is not held during callbacks."""

    def __init__(
        self, *, max_inside: int = MAX_INSIDE, max_waiting: int = MAX_WAITING,
        max_waiting_of_address: int = MAX_WAITING_OF_ADDRESS,
    ) -> None:  # fmt: skip
        self._max_inside, self._max_waiting, self._max_of_address = max_inside, max_waiting, max_waiting_of_address
        self._waiting: dict[int, _Waiting] = {}  # oldest first
        self._inside: set[int] = set()
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Connections in their handshake that have not been displaced."""
        return len(self._waiting)

    def wait(self, number: int, address: str | None, give_way: Callable[[], None]) -> None:
        """Register a connection in its handshake; `give_way` closes it, from any thread and without blocking.

        An `address` of None counts towards the total only: it belongs to a connection of this host.
        """
        with self._lock:
            displaced = self._oldest_in_the_way(address)
            gone = None if displaced is None else self._waiting.pop(displaced)
            self._waiting[number] = _Waiting(address, give_way)
        if gone is not None:
            gone.give_way()

    def enter(self, number: int) -> None:
        """Admit a connection after its handshake. Raises Unavailable, with the limit, if displaced or full."""
        with self._lock:
            if number not in self._waiting:
                raise Unavailable(
                    f"displaced by later connections: the limits are {self._max_waiting} handshakes at once, and "
                    f"{self._max_of_address} from one address"
                )
            if len(self._inside) >= self._max_inside:
                raise Unavailable(f"{len(self._inside)} KV links are open, and the limit is {self._max_inside}")
            del self._waiting[number]
            self._inside.add(number)

    def leave(self, number: int) -> None:
        """Remove a connection in either state. Idempotent."""
        with self._lock:
            self._waiting.pop(number, None)
            self._inside.discard(number)

    def _oldest_in_the_way(self, address: str | None) -> int | None:
        if address is not None:
            those = [number for number, one in self._waiting.items() if one.address == address]
            if len(those) >= self._max_of_address:
                return those[0]
        return next(iter(self._waiting)) if len(self._waiting) >= self._max_waiting else None
