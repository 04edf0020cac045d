"""Which prefill worker has which engine id: decode workers find KV by the id alone (NixlBaseConnectorWorker).

With one id on two workers a decode worker would read the memory of the first one that it has met, and answer from it.
The proof of the second pair does not show that if the first worker's blocks still hold the same prompt.
"""

from wire.errors import HandoffFailed


class EngineIds:
    """Owner of the ids of the living prefill workers, by the worker that had each first."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}

    def claim(self, engine_id: str, address: str) -> None:
        """Record the engine id of the worker at `address`. Raises HandoffFailed if another living one has it."""
        owner = self._owners.setdefault(engine_id, address)
        if owner != address:
            raise HandoffFailed(
                f"its engine_id {engine_id[:80]} is also that of {owner}, whose KV decode would read: give each worker "
                "its own in --kv-transfer-config"
            )

    def release(self, address: str) -> None:
        """Forget the ids of a worker whose session has ended."""
        self._owners = {one: owner for one, owner in self._owners.items() if owner != address}
