"""The interface of each rank's sender and receiver, whether it runs in rank 0's process or in its own."""

import threading
from collections.abc import Sequence
from typing import Protocol

from kvtransfer.interface import Sender
from kvtransfer.link import Link
from kvtransfer.receiver_counts import ReceiverCounts
from kvtransfer.totals import PeerProcess
from wire.load import LinkStatus
from wire.types import KvEndpoint


class RankSender(Sender, Protocol):
    """One rank's sender: a KvSender, or a proxy for one in another process."""

    @property
    def frames_resent(self) -> int:
        """Frames that were sent again."""
        ...

    def links_of_ranks(self) -> list[tuple[PeerProcess, LinkStatus]]:
        """Return the current links to each rank of each peer, each with the peer's process."""
        ...

    def measure(
        self, peer_id: str, epoch: int, endpoints: Sequence[KvEndpoint], num_bytes: int, timeout_s: float
    ) -> LinkStatus:
        """Measure one link. Raises PdserveError."""
        ...

    def sweep(self) -> None:
        """Make every link check its leases now."""
        ...

    def end(self) -> list[Link]:
        """Abort everything; return the links of this process, whose threads are about to end."""
        ...


class RankReceiver(Protocol):
    """One rank's receiver: a KvReceiver, or a proxy for one in another process."""

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Endpoints at which senders reach it, best first."""
        ...

    @property
    def bytes_received(self) -> int:
        """KV bytes copied into its pool."""
        ...

    @property
    def counts(self) -> ReceiverCounts:
        """Counts of what was received so far."""
        ...

    def sweep(self, now: float | None = None) -> None:
        """End the tickets whose lease has expired."""
        ...

    def end(self) -> list[threading.Thread]:
        """Abort everything; return the threads of this process that are about to end."""
        ...

    def end_links(self) -> list[threading.Thread]:
        """Close listeners and connections, once no more are accepted; return the threads, which are about to end."""
        ...

    def close(self) -> None:
        """Do what `end` and `end_links` do, and join the threads."""
        ...
