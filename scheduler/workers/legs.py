"""The two requests of a hand-off between workers, and the data that one needs from the other, opaque here. Pure."""

import os
import secrets
from collections.abc import Sequence
from typing import Any

import orjson

from wire.cheap_dataclass import cheap_dataclass
from wire.types import KvEndpoint, PromptState, Ticket

LEASE_S = 20.0
"""How long a reference may be used: vLLM holds the KV for 30 s, and a slow machine needs time to request it."""


def new_request_id() -> str:
    """Return an id for both legs of a sequence: new for each attempt, because connectors find KV by it."""
    return os.urandom(16).hex()


def headers_of(prompt: PromptState, request_id: str) -> dict[str, str]:
    """Return the headers of a request to a worker."""
    return {"X-Request-Id": request_id} | ({"traceparent": prompt.traceparent} if prompt.traceparent else {})


@cheap_dataclass(frozen=True, slots=True)
class WorkerRequest:
    """One request to a worker: its id, and the `kv_transfer_params` of its body, None without a hand-off.

    `is_early`: the other leg is computing the prompt. `until` is the end of the lease, by the loop's clock.
    """

    request_id: str
    params: dict[str, Any] | None = None
    is_early: bool = False
    until: float | None = None

    def pack(self) -> bytes:
        """Return the request as bytes for the worker of the other leg."""
        return orjson.dumps([self.request_id, self.params, self.is_early, self.until])


def unpack(packed: str) -> WorkerRequest:
    """Return what `pack` packed."""
    return WorkerRequest(*orjson.loads(packed))


def asking(request_id: str, callback_url: str) -> WorkerRequest:
    """Return the request to a decode worker that gets it first, and calls back with the blocks it has allocated.

    MooncakeLayerwiseConnector calls that URL the metaserver.
    """
    return WorkerRequest(request_id, {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": callback_url})


def ticket_of(
    prompt: PromptState, instance_id: str, epoch: int, wanted: Sequence[WorkerRequest], lease_s: float
) -> Ticket:
    """Return a ticket with the bodies of a decode worker's callbacks: `wanted` has one for each sequence."""
    said = [(one.params or {}).get("remote_cached_tokens") for one in wanted]
    return Ticket(
        ticket_id=secrets.token_hex(16),
        epoch=epoch,
        instance_id=instance_id,
        num_tokens=len(prompt.token_ids),
        first_token=min(number if isinstance(number, int) else 0 for number in said),
        lease_s=lease_s,
        endpoints=tuple(KvEndpoint("callback", one.pack().decode()) for one in wanted),
    )


def requests_of(ticket: Ticket) -> list[WorkerRequest]:
    """Return the prefill requests of a ticket."""
    return [unpack(endpoint.address) for endpoint in ticket.endpoints]
