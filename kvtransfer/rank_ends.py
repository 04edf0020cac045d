"""What an instance's sender and receiver ask of each rank's, whether it lives in rank 0's process or in its own."""

import threading
from collections.abc import Sequence
from typing import Protocol

from kvtransfer.interface import Sender
from kvtransfer.link import Link
from kvtransfer.ticket_table import ReceiverCounts
from kvtransfer.totals import Life
from wire.types import KvEndpoint, LinkStatus


class RankSender(Sender, Protocol):
    """One rank's sender: a KvSender, or what stands for one in another process."""

    @property
    def frames_resent(self) -> int:
        """Frames that went out a second time."""
        ...

    def links_of_ranks(self) -> list[tuple[Life, LinkStatus]]:
        """The links to each rank of each peer as they are now, and to which of its lives."""
        ...

    def measure(
        self, peer_id: str, epoch: int, endpoints: Sequence[KvEndpoint], num_bytes: int, timeout_s: float
    ) -> LinkStatus:
        """Measure one link. Raises PdserveError."""
        ...

    def sweep(self) -> None:
        """Make every link look at its leases now."""
        ...

    def end(self) -> list[Link]:
        """Abort everything; return the links of this process, whose threads are about to end."""
        ...


class RankReceiver(Protocol):
    """One rank's receiver, likewise."""

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Where senders reach it, best first."""
        ...

    @property
    def bytes_received(self) -> int:
        """KV bytes moved into its pool."""
        ...

    @property
    def counts(self) -> ReceiverCounts:
        """What has come in so far."""
        ...

    def sweep(self, now: float | None = None) -> None:
        """End the tickets whose lease ran out."""
        ...

    def end(self) -> list[threading.Thread]:
        """Abort everything; return the threads of this process that are about to end."""
        ...

    def end_links(self) -> list[threading.Thread]:
        """Close the door and every connection, once nobody accepts; return their threads, which are about to end."""
        ...

    def close(self) -> None:
        """Both, and join the threads."""
        ...
