"""How workers use the hand-off: a sender on P and a receiver on D. Both are thread-safe and never block.

    prefill_worker -> KvSender (sender.py)  ==link==>  KvReceiver (receiver.py) -> decode_worker

State machines: ticket.py, sender_ticket.py. Links and transports: peer.py, link.py, health.py, transport_table.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from wire.errors import PdserveError
from wire.kv_layout import PoolLayout
from wire.load import LinkStatus
from wire.types import KvEndpoint, Ticket


class PoolMemory(Protocol):
    """The pool's memory: the sender reads it; the receiver, its owner, writes it."""

    layout: PoolLayout

    @property
    def fd(self) -> int | None:
        """The sealed memfd that contains the whole pool, or None."""
        ...

    @property
    def buffer(self) -> memoryview:
        """The whole pool as bytes."""
        ...


@dataclass(frozen=True, slots=True)
class SendStats:
    """Statistics of one hand-off on the sender, from the first frame's announcement to the ack.

    Of `kv_bytes`, `early_bytes` were announced before the commit was posted: their transfer overlapped with prefill.
    """

    transport: str
    kv_bytes: int
    seconds: float
    resent_frames: int
    early_bytes: int = 0


class SenderEvents(Protocol):
    """Events of the sender, one per ticket. Called on the sender's threads; must not block."""

    def acked(self, ticket_id: str, stats: SendStats) -> None:
        """The receiver has committed: the blocks may be freed."""
        ...

    def failed(self, ticket_id: str, error: PdserveError) -> None:
        """The ticket ended without commit (link lost, receiver aborted, lease expired): the blocks may be freed."""
        ...


class Sender(Protocol):
    """P's half. `begin`, `put`, `commit`, `abort` are idempotent and do nothing for a ticket that has ended."""

    @property
    def bytes_sent(self) -> int:
        """KV bytes announced and sent since the start."""
        ...

    def begin(self, ticket: Ticket) -> None:
        """Choose the link to the ticket's instance (dialling if necessary) and open the ticket on it."""
        ...

    def put(self, ticket_id: str, layer: int, start: int, end: int, block_ids: Sequence[int]) -> None:
        """Queue the frames of every KV tensor of `layer` for tokens [start, end) of the prompt in these blocks.

        On a device the KV may not be computed yet: the frames are sent once the device has reached the mark that is the
        pool's newest at this call.
        """
        ...

    def commit(self, ticket_id: str, description: bytes) -> None:
        """After the last frame: send the receiver the description of the prompt (a serialised PromptState)."""
        ...

    def abort(self, ticket_id: str, reason: str) -> None:
        """End the ticket and notify the receiver. Emits no event.

        When this returns, the blocks may be freed: KV not read from them by then is never committed.
        """
        ...

    def links(self) -> tuple[LinkStatus, ...]:
        """Return the current links."""
        ...

    def close(self) -> None:
        """Abort everything and join the threads."""
        ...


class ReceiverEvents(Protocol):
    """Events of the receiver, on its own threads (`ended` also on a thread that calls `abort`); must not block long.

    Handlers must not take a lock that a caller of `Receiver.abort` holds.
    """

    def committed(self, ticket_id: str, description: bytes, block_ids: tuple[int, ...], kv_bytes: int) -> None:
        """Every frame is received and verified: the blocks now belong to the prompt described.

        Raising a PdserveError aborts the ticket instead and notifies the sender; `ended` is then called for the blocks.
        """
        ...

    def ended(self, ticket_id: str, block_ids: tuple[int, ...], reason: str) -> None:
        """The ticket is ABORTED or EXPIRED: its blocks may be freed. Never after `committed` returned."""
        ...


class Receiver(Protocol):
    """D's half."""

    @property
    def bytes_received(self) -> int:
        """KV bytes received and verified since the start."""
        ...

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Endpoints at which senders reach it, best first."""
        ...

    def open(self, ticket_id: str, *, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> Ticket:
        """Open a ticket whose frames are written into `block_ids` (block i holds tokens [i*block_size, ...))."""
        ...

    def abort(self, ticket_id: str, reason: str) -> None:
        """End a ticket and notify its sender, if any. `ended` is called unless the ticket had ended already."""
        ...

    def close(self) -> None:
        """Abort everything, stop listening, join the threads."""
        ...
