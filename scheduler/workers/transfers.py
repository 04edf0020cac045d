"""How KV gets from a prefill to a decode worker: what each leg of a hand-off sends as `kv_transfer_params`.

HeldKv      NixlConnector, MooncakeConnectorV1   prefill's answer names the blocks that decode reads
PushedKv    NixlPushConnector                    decode registers with an engine, named by an earlier answer
MooncakeKv  MooncakeConnector                    decode requests KV from the engine that the bootstrap server names
"""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from scheduler.workers.answers import kv_transfer_params
from wire.errors import HandoffFailed, PdserveError

_HELD = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""The fields that make a worker keep the prompt's KV for another one."""


class Transfer(Protocol):
    """The hand-offs from one process of a prefill worker. `request_id` is that of both legs."""

    async def prepare(self) -> None:
        """Look up what decode must know about this worker. Raises HandoffFailed."""

    def prefill_leg(self, request_id: str) -> dict[str, Any]:
        """Return the parameters of the prefill leg."""
        ...

    def early_reference(self, request_id: str) -> dict[str, Any] | None:
        """Return the parameters of a decode leg sent while prefill computes; None if it needs prefill's answer."""
        ...

    def reference(self, request_id: str, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters of a decode leg sent after prefill's answer. Raises HandoffFailed without KV."""
        ...


class HeldKv:
    """Prefill holds the KV until decode has read it. Implements Transfer."""

    async def prepare(self) -> None:
        """Do nothing: the answer has all that decode needs."""

    def prefill_leg(self, request_id: str) -> dict[str, Any]:
        """Request a reference."""
        return _HELD

    def early_reference(self, request_id: str) -> None:
        """Return None: only the answer has it."""

    def reference(self, request_id: str, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the answer's reference."""
        return kv_transfer_params(answer)


class PushedKv:
    """Prefill writes the KV to decode, which has registered with prefill's engine. Implements Transfer.

    Decode registers under the request id of both legs.
    """

    def __init__(self) -> None:
        self._engine: dict[str, Any] | None = None

    async def prepare(self) -> None:
        """Do nothing: the first answer names the engine."""

    def prefill_leg(self, request_id: str) -> dict[str, Any]:
        """Request a reference."""
        return _HELD

    def early_reference(self, request_id: str) -> dict[str, Any] | None:
        """Return the first answer's reference under this id.

        It keeps the first answer's blocks: a decode worker with NixlConnector refuses them; without blocks it crashes.
        """
        return None if self._engine is None else self._engine | {"remote_request_id": request_id}

    def reference(self, request_id: str, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the answer's reference; keep the first one."""
        found = kv_transfer_params(answer)
        match found.get("transfer_mode"):
            case "push":
                pass
            case None:  # a decode worker of these versions does not check that both push, and would read old blocks
                raise HandoffFailed(
                    "its answer has no transfer_mode, which NixlPushConnector sends from vLLM 0.32 on: "
                    "use --connector auto"
                )
            case _:
                raise HandoffFailed("its connector is not NixlPushConnector: use --connector nixl")
        self._engine = self._engine or found
        if found["remote_engine_id"] != self._engine["remote_engine_id"]:
            raise HandoffFailed("its engine is not the one that was sent to decode workers")
        return found


class MooncakeKv:
    """Prefill writes the KV to decode, which requests it from prefill's engine by transfer id. Implements Transfer."""

    def __init__(self, bootstrap_url: str, rank: int, query: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        """`query` returns the engines at `bootstrap_url` by rank. Raises a PdserveError."""
        self._bootstrap_url = bootstrap_url
        self._rank = str(rank)
        self._query = query
        self._engine_id = ""

    async def prepare(self) -> None:
        """Query the bootstrap server for the engine of this rank, once."""
        if self._engine_id:
            return
        try:
            entry = (await self._query()).get(self._rank)
        except PdserveError as error:
            raise HandoffFailed(
                "its Mooncake bootstrap server does not answer: does it run MooncakeConnector, at the port that "
                "VLLM_MOONCAKE_BOOTSTRAP_PORT names here?"
            ) from error
        if not isinstance(entry, dict) or not isinstance(entry.get("engine_id"), str):
            raise HandoffFailed(f"its Mooncake bootstrap server names no engine for rank {self._rank}")
        self._engine_id = entry["engine_id"]

    def prefill_leg(self, request_id: str) -> dict[str, Any]:
        """Name the transfer."""
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"xfer-{request_id}"}

    def early_reference(self, request_id: str) -> dict[str, Any]:
        """Name the transfer, the engine and where to find it."""
        return {
            "do_remote_decode": False, "do_remote_prefill": True, "transfer_id": f"xfer-{request_id}",
            "remote_bootstrap_addr": self._bootstrap_url, "remote_engine_id": self._engine_id,
        }  # fmt: skip

    def reference(self, request_id: str, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the early reference. A prefill not finished by length holds no KV: decode would wait forever."""
        reason = answer["choices"][0].get("finish_reason")
        if reason != "length":
            raise HandoffFailed(f"it finished the prompt by {reason!r}, not by length, and holds no KV")
        return self.early_reference(request_id)
