"""P's half of the hand-off: finds or makes the link to a ticket's instance and posts to it. Callers never wait."""

import threading
import time
from collections.abc import Callable, Sequence

from kvtransfer.interface import PoolMemory, SenderEvents
from kvtransfer.link import Link
from kvtransfer.link_ops import Begin, Drop, Finish, LinkSettings, Lost, Put, Tend
from kvtransfer.transport import Timeouts
from kvtransfer.transports import make_transports
from wire.errors import InstanceLost
from wire.failpoints import Failpoints, process_failpoints
from wire.trust import Trust
from wire.types import LinkStatus, Ticket

_JOIN_S = 5.0


class KvSender:
    """Implements interface.Sender. Owner of the links, one per (instance, epoch), and of who reports each ending."""

    def __init__(
        self, memory: PoolMemory, *, instance_id: str, epoch: int, transports: Sequence[str] = (),
        events: SenderEvents, clock: Callable[[], float] = time.monotonic, progress_age: Callable[[], float],
        connect_timeout_s: float = 2.0, progress_timeout_s: float = 10.0, tend_interval_s: float = 0.5,
        digests: bool = True, trust: Trust | None = None,
        failpoints: Failpoints | None = None,
    ) -> None:  # fmt: skip
        self._settings = LinkSettings(
            instance_id=instance_id, epoch=epoch, memory=memory,
            transports=make_transports(transports, memory), events=events, claim=self._claim,
            clock=clock, progress_age=progress_age, failpoints=failpoints or process_failpoints(),
            timeouts=Timeouts(connect_timeout_s, progress_timeout_s), tend_interval_s=tend_interval_s, digests=digests,
            trust=trust or Trust(),
        )  # fmt: skip
        self._links: dict[tuple[str, int], Link] = {}
        self._link_by_ticket: dict[str, Link] = {}
        self._link_epoch = 0
        self._bytes_of_gone_links = 0
        self._closed = False
        self._lock = threading.Lock()

    def begin(self, ticket: Ticket) -> None:
        """Choose the link to the ticket's instance (dialling it if need be) and open the ticket on it."""
        with self._lock:
            if self._closed or ticket.ticket_id in self._link_by_ticket:
                return
            op, link = Begin(ticket), self._links.get((ticket.instance_id, ticket.epoch))
            if link is not None:
                self._link_by_ticket[ticket.ticket_id] = link
            if link is None or not link.begin(op):
                link = self._new_link(ticket, link)
                self._link_by_ticket[ticket.ticket_id] = link
                link.begin(op)
                link.thread.start()

    def put(self, ticket_id: str, layer: int, start: int, end: int, block_ids: Sequence[int]) -> None:
        """Queue the frames of every KV tensor of `layer` for tokens [start, end) of the prompt in these blocks."""
        link = self._link_by_ticket.get(ticket_id)
        if link is not None:
            link.post(Put(ticket_id, layer, start, end, tuple(block_ids)))

    def commit(self, ticket_id: str, description: bytes) -> None:
        """After the last frame: tell the receiver what the prompt is."""
        link = self._link_by_ticket.get(ticket_id)
        if link is not None:
            link.post(Finish(ticket_id, description))

    def abort(self, ticket_id: str, reason: str) -> None:
        """End the ticket; the receiver is told. Reports no event."""
        link = self._link_by_ticket.pop(ticket_id, None)
        if link is not None:
            link.post(Drop(ticket_id, reason))

    def links(self) -> tuple[LinkStatus, ...]:
        """The links as they are now."""
        with self._lock:
            return tuple(link.status() for link in self._links.values())

    @property
    def bytes_sent(self) -> int:
        """KV bytes announced to all instances."""
        with self._lock:
            return self._bytes_of_gone_links + sum(link.bytes_sent for link in self._links.values())

    def sweep(self) -> None:
        """Make every link look at its leases now; they do so by themselves every tend interval."""
        with self._lock:
            for link in self._links.values():
                link.post(Tend())

    def close(self) -> None:
        """Abort everything and join the threads."""
        with self._lock:
            self._closed = True
            self._link_by_ticket.clear()
            links = list(self._links.values())
        for link in links:
            link.post(Lost(None))
        for link in links:
            link.join(_JOIN_S)

    def _claim(self, ticket_id: str) -> bool:
        return self._link_by_ticket.pop(ticket_id, None) is not None

    def _new_link(self, ticket: Ticket, old: Link | None) -> Link:
        self._drop_older_epochs(ticket)
        self._link_epoch += 1
        link = Link(
            self._settings, ticket.instance_id, ticket.epoch, self._link_epoch, ticket.endpoints,
            bytes_sent=0 if old is None else old.bytes_sent, failures=0 if old is None else old.status().failures,
        )  # fmt: skip
        self._links[ticket.instance_id, ticket.epoch] = link
        return link

    def _drop_older_epochs(self, ticket: Ticket) -> None:
        for peer_id, epoch in list(self._links):
            if peer_id == ticket.instance_id and epoch != ticket.epoch:
                gone = self._links.pop((peer_id, epoch))
                gone.post(Lost(InstanceLost(f"{peer_id} of epoch {epoch:x} is replaced by epoch {ticket.epoch:x}")))
                self._bytes_of_gone_links += gone.bytes_sent
