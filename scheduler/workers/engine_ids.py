"""Which prefill worker has which engine id: decode workers find KV by the id alone (NixlBaseConnectorWorker).

If two workers have the same id, a decode worker reads the memory of the one that it contacted first until a read fails;
then it may contact the other. Decode workers contact only listed workers, so once the first is no longer listed,
another worker may have the id: the proof of a pair fails while its decode worker still reads the memory of the first.
"""

from collections.abc import Callable

from wire.errors import HandoffFailed

_MOST = 10_000


class EngineIds:
    """Owner of the latest ids of the prefill workers, and of the worker that had each id first.

    A worker that is lost keeps its id, as it may return.
    """

    def __init__(self, is_listed: Callable[[str], bool] = lambda _: True) -> None:
        """`is_listed`: whether an address is that of a member, or of one that is leaving."""
        self._is_listed = is_listed
        self._owners: dict[str, str] = {}
        self._ids: dict[str, str] = {}  # by address; the worker that claimed its id last is the last item

    def claim(self, engine_id: str, address: str) -> None:
        """Record the engine id of the worker at `address`. Raises HandoffFailed if another worker has this id."""
        owner = self._owners.setdefault(engine_id, address)
        if owner != address and not self._is_listed(owner):
            del self._ids[owner]
            self._owners[engine_id] = owner = address
        if owner != address:
            raise HandoffFailed(
                f"its engine_id {engine_id[:80]} is also that of {owner}, whose KV would be read: give each worker "
                "its own in --kv-transfer-config"
            )
        earlier = self._ids.pop(address, engine_id)
        self._ids[address] = engine_id
        if earlier != engine_id:  # another process
            del self._owners[earlier]
        if len(self._ids) > _MOST:
            del self._owners[self._ids.pop(next(iter(self._ids)))]
