"""The exchange as a c10d Store: torch's store requests during a group's creation are sent over the link's own stream.

A Python-derived Store (a pybind11 trampoline) was tried with torch 2.13: gloo's full mesh uses set, wait and get of
"0/<rank>"; an exception raised here propagates unchanged out of the group's constructor. NCCL's and HCCL's groups use
set and get of "0:1", in their first operation. Needs torch.

torch's own threads around these groups use the store too, as long as the group exists: they check whether a rank has
requested a dump, and set that key after a failed operation. They see and change only the keys of this side.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from kvtransfer.process_group.exchange import SetupExchange
from kvtransfer.stream import LinkLost


class LinkStore(Store):
    """Implements torch's Store for one group: no port, no further connection, a deadline on every wait.

    Only one thread reads and writes the link's stream: the one that constructs this store and then the group.
    """

    def __init__(self, exchange: SetupExchange) -> None:
        super().__init__()
        self._exchange, self._maker = exchange, threading.get_ident()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key: on both sides if called in the thread that makes the group, otherwise only on this side."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        if self._is_maker():
            self._exchange.set(key, data)
        else:
            self._exchange.keep(key, data)

    def get(self, key: str) -> bytes:
        """Return a key's value; only the thread that makes the group waits for it."""
        self.wait([key])
        return self._exchange.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys, never past the exchange's deadline; in other threads raise LinkLost if a key is not set."""
        if self._is_maker():
            self._exchange.wait(keys, timeout.total_seconds() if timeout is not None else float("inf"))
        elif not self._exchange.check(keys):
            raise LinkLost(f"torch's own threads do not wait for keys: {', '.join(keys)}")

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set on this side; never reads the stream."""
        return self._exchange.check(keys)

    def delete_key(self, key: str) -> bool:
        """Delete a key on this side."""
        return self._exchange.delete(key)

    def num_keys(self) -> int:
        """Return the number of keys on this side."""
        return self._exchange.num_keys

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return False: no append and no queues; a counter needs one owner, so `add` and `compare_set` raise too."""
        return False

    def _is_maker(self) -> bool:
        return threading.get_ident() == self._maker
