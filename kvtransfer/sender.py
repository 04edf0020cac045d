"""P's half of the hand-off: finds or makes the link to a ticket's instance and posts to it. Callers never wait."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from kvtransfer.interface import PoolMemory, SenderEvents
from kvtransfer.link_ops import Drop, Finish, LinkSettings, Put
from kvtransfer.peer import Peer, PeerKey, key_of
from kvtransfer.routes import Routes
from kvtransfer.transport import Timeouts
from kvtransfer.transports import make_transports
from wire.errors import InstanceLost
from wire.failpoints import Failpoints, process_failpoints
from wire.trust import Trust
from wire.types import LinkStatus, Ticket

_JOIN_S = 5.0


class KvSender:
    """Implements interface.Sender. Owner of the peers, one per (instance, epoch), and of the tickets' routes."""

    def __init__(
        self, memory: PoolMemory, *, instance_id: str, epoch: int, transports: Sequence[str] = (),
        events: SenderEvents, clock: Callable[[], float] = time.monotonic, progress_age: Callable[[], float],
        connect_timeout_s: float = 2.0, progress_timeout_s: float = 10.0, tend_interval_s: float = 0.5,
        digests: bool = True, trust: Trust | None = None,
        failpoints: Failpoints | None = None,
    ) -> None:  # fmt: skip
        self._routes = Routes()
        self._settings = LinkSettings(
            instance_id=instance_id, epoch=epoch, memory=memory,
            transports=make_transports(transports, memory), events=events, claim=self._routes.claim,
            clock=clock, progress_age=progress_age, failpoints=failpoints or process_failpoints(),
            timeouts=Timeouts(connect_timeout_s, progress_timeout_s), tend_interval_s=tend_interval_s, digests=digests,
            trust=trust or Trust(),
        )  # fmt: skip
        self._peers: dict[PeerKey, Peer] = {}
        self._link_epochs = itertools.count(1)
        self._bytes_of_gone_peers = 0
        self._closed = False
        self._lock = threading.Lock()

    def begin(self, ticket: Ticket) -> None:
        """Choose the link to the ticket's instance (dialling it if need be) and open the ticket on it."""
        with self._lock:
            if not self._closed and self._routes.open(ticket.ticket_id):
                link = self._peer(ticket).begin(ticket)
                if not self._routes.add(ticket.ticket_id, link):
                    link.post(Drop(ticket.ticket_id, "aborted while it was begun"))

    def put(self, ticket_id: str, layer: int, start: int, end: int, block_ids: Sequence[int]) -> None:
        """Queue the frames of every KV tensor of `layer` for tokens [start, end) of the prompt in these blocks."""
        for link in self._routes.links(ticket_id):
            link.post(Put(ticket_id, layer, start, end, tuple(block_ids)))

    def commit(self, ticket_id: str, description: bytes) -> None:
        """After the last frame: tell the receiver what the prompt is."""
        for link in self._routes.links(ticket_id):
            link.post(Finish(ticket_id, description))

    def abort(self, ticket_id: str, reason: str) -> None:
        """End the ticket; the receiver is told. Reports no event."""
        for link in self._routes.take(ticket_id) or ():
            link.post(Drop(ticket_id, reason))

    def links(self) -> tuple[LinkStatus, ...]:
        """The links as they are now, one status a peer."""
        with self._lock:
            return tuple(status for peer in self._peers.values() if (status := peer.status()) is not None)

    @property
    def bytes_sent(self) -> int:
        """KV bytes announced to all instances."""
        with self._lock:
            return self._bytes_of_gone_peers + sum(peer.bytes_sent for peer in self._peers.values())

    def sweep(self) -> None:
        """Make every link look at its leases now; they do so by themselves every tend interval."""
        with self._lock:
            for peer in self._peers.values():
                peer.tend()

    def close(self) -> None:
        """Abort everything and join the threads."""
        with self._lock:
            self._closed = True
            self._routes.clear()
            peers = list(self._peers.values())
        for peer in peers:
            peer.end(None)
        for peer in peers:
            peer.join(_JOIN_S)

    def _peer(self, ticket: Ticket) -> Peer:
        key = key_of(ticket)
        peer = self._peers.get(key)
        if peer is None:
            self._drop_older_epochs(key)
            peer = self._peers[key] = Peer(self._settings, key, self._link_epochs)
        return peer

    def _drop_older_epochs(self, new: PeerKey) -> None:
        for key in list(self._peers):
            if key.instance_id == new.instance_id:
                gone = self._peers.pop(key)
                gone.end(InstanceLost(f"{key.instance_id} of epoch {key.epoch:x} is replaced by epoch {new.epoch:x}"))
                self._bytes_of_gone_peers += gone.bytes_sent
