"""P's half of the hand-off: finds the peer of a ticket's instance and posts to the chosen link. Callers never block."""

import itertools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvtransfer.device_memory import device_memory
from kvtransfer.guarded_events import GuardedEvents
from kvtransfer.interface import PoolMemory, SenderEvents, SendStats
from kvtransfer.link import Link, join_all
from kvtransfer.link_ops import Drop, FinishTicket, LinkSettings, PeerKey, Put
from kvtransfer.peer import Peer
from kvtransfer.probe import check_num_bytes
from kvtransfer.rank_ends import RankSender
from kvtransfer.ranks import count_ranks, receivers_of
from kvtransfer.routes import Routes
from kvtransfer.totals import PeerProcess, merge_links
from kvtransfer.transport_interface import Timeouts
from kvtransfer.transport_table import make_transports
from processes.failpoints import Failpoints, process_failpoints
from security.trust import Trust
from wire.errors import DeadlineExceeded, Draining, Incompatible, PdserveError, Unavailable
from wire.kv_layout import Rank
from wire.load import LinkStatus
from wire.types import KvEndpoint, Ticket

_JOIN_S = 5.0
_REMEMBERED_EPOCHS = 8


class KvSender:
    """One rank of P: owner of its peers, one per (instance, epoch, rank of D), and of the tickets' routes.

    A single rank implements interface.Sender; several ranks are used by a RanksSender (all_ranks.py).
    """

    def __init__(
        self, memory: PoolMemory, *, instance_id: str, epoch: int, transports: Sequence[str] = (),
        events: SenderEvents, clock: Callable[[], float] = time.monotonic, progress_age: Callable[[], float],
        connect_timeout_s: float = 2.0, progress_timeout_s: float = 10.0, check_interval_s: float = 0.5,
        digests: bool = True, links_per_peer: int = 2, trust: Trust | None = None,
        failpoints: Failpoints | None = None, source: str | None = None, catch_up: Callable[[], bool] | None = None,
        step_timeout_s: float = math.inf,
    ) -> None:  # fmt: skip
        """`catch_up` applies the aborts sent so far by another process, if that is where tickets are aborted.

        `step_timeout_s`: see Timeouts.
        """
        self._routes = Routes()
        self._settings = LinkSettings(
            instance_id=instance_id, epoch=epoch, memory=memory,
            transports=make_transports(transports, memory, source=source), events=GuardedEvents(events),
            acked=self._on_acked, claim=self._drop_failed, is_open=self._routes.is_open, catch_up=catch_up, clock=clock,
            progress_age=progress_age, failpoints=failpoints or process_failpoints(),
            timeouts=Timeouts(connect_timeout_s, progress_timeout_s, step_timeout_s),
            check_interval_s=check_interval_s, digests=digests, links_per_peer=links_per_peer, trust=trust or Trust(),
        )  # fmt: skip
        self._device_pool = device_memory(memory)
        self._peers: dict[PeerKey, Peer] = {}
        self._epochs: dict[str, deque[int]] = {}  # by instance, in the order they were first seen
        self._receivers: dict[int, tuple[int, ...]] = {}  # the ranks of D to send to, by D's number of ranks
        self._link_epochs = itertools.count(1)
        self._bytes_of_gone = self._resent_of_gone = 0
        self._closed = False
        self._lock = threading.Lock()

    def begin(self, ticket: Ticket) -> None:
        """Choose the link to the ticket's instance (dialling if necessary) and open the ticket on it."""
        try:
            num_receivers = count_ranks(ticket.endpoints)
        except Incompatible as error:
            self._settings.events.failed(ticket.ticket_id, error)
            return
        ranks = self._receivers_of(num_receivers)
        with self._lock:
            if self._closed or not self._routes.open(ticket.ticket_id, len(ranks)):
                return
        for rank in ranks:
            self._begin(ticket, PeerKey(ticket.instance_id, ticket.epoch, Rank(rank, num_receivers)))

    def put(self, ticket_id: str, layer: int, start: int, end: int, block_ids: Sequence[int]) -> None:
        """Queue the frames of every KV tensor of `layer` for tokens [start, end) of the prompt in these blocks."""
        mark = None if self._device_pool is None else self._device_pool.mark()
        for link in self._routes.links(ticket_id):
            link.post(Put(ticket_id, (layer,), start, end, tuple(block_ids), mark))

    def commit(self, ticket_id: str, description: bytes) -> None:
        """After the last frame: send the receiver the description of the prompt."""
        for link in self._routes.links(ticket_id):
            part = description if link.rank == 0 else b""  # only the receiver's rank 0 needs it
            link.post(FinishTicket(ticket_id, part, link.announced(ticket_id)))

    def abort(self, ticket_id: str, reason: str) -> None:
        """End the ticket and notify the receiver. Emits no event."""
        for link in self._routes.take(ticket_id) or ():
            link.post(Drop(ticket_id, reason))

    def links(self) -> tuple[LinkStatus, ...]:
        """Return the current links, one status per peer."""
        return merge_links(self.links_of_ranks())

    def links_of_ranks(self) -> list[tuple[PeerProcess, LinkStatus]]:
        """Return the current links to each rank of each peer, each with the peer's process."""
        with self._lock:
            self._forget_gone()
            return [((key.instance_id, key.epoch), peer.status()) for key, peer in self._peers.items()]

    def measure(
        self, peer_id: str, epoch: int, endpoints: Sequence[KvEndpoint], num_bytes: int, timeout_s: float
    ) -> LinkStatus:
        """Measure round trip and bandwidth of the link to a peer with bytes that are written to no pool. Blocks.

        Dials if necessary. Raises the errors of `start_measure`, and DeadlineExceeded.
        """
        answers: queue.SimpleQueue[LinkStatus | PdserveError] = queue.SimpleQueue()
        self.start_measure(peer_id, epoch, endpoints, num_bytes, timeout_s, answers.put)
        try:
            answer = answers.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(f"the link to {peer_id} could not be measured within {timeout_s:g} s") from None
        if isinstance(answer, PdserveError):
            raise answer
        return answer

    def start_measure(
        self, peer_id: str, epoch: int, endpoints: Sequence[KvEndpoint], num_bytes: int, timeout_s: float,
        done: Callable[[LinkStatus | PdserveError], None],
    ) -> None:  # fmt: skip
        """Like `measure`, without blocking: `done` is called once, on a thread of the link; `done` must not block.

        Raises InvalidRequest for too many bytes, Draining after `close`, Unavailable if no thread can be started.
        """
        check_num_bytes(num_bytes)
        deadline = self._settings.clock() + timeout_s
        with self._lock:
            if self._closed:
                raise Draining("the KV sender is closed")
            rank = Rank(0, count_ranks(endpoints))
            self._peer(PeerKey(peer_id, epoch, rank)).measure(endpoints, num_bytes, deadline, done)

    @property
    def bytes_sent(self) -> int:
        """KV bytes announced to all instances."""
        with self._lock:
            return self._bytes_of_gone + sum(peer.bytes_sent for peer in self._peers.values())

    @property
    def frames_resent(self) -> int:
        """Frames that were sent again."""
        with self._lock:
            return self._resent_of_gone + sum(peer.frames_resent for peer in self._peers.values())

    def sweep(self) -> None:
        """Make every link check its leases now; they do so by themselves at an interval."""
        with self._lock:
            for peer in self._peers.values():
                peer.check_leases()

    def close(self) -> None:
        """Abort everything and join the threads."""
        close_senders([self])

    def end(self) -> list[Link]:
        """Abort everything; return the links, whose threads are about to end."""
        with self._lock:
            self._closed = True
            self._routes.clear()
            peers = list(self._peers.values())
        for peer in peers:
            peer.end()
        return [link for peer in peers for link in peer.links()]

    def _begin(self, ticket: Ticket, key: PeerKey) -> None:
        link, error = None, None
        with self._lock:
            if self._closed:
                return
            try:
                link = self._peer(key).begin(ticket)
            except Unavailable as reason:
                error = reason
        if link is not None and not self._routes.add(ticket.ticket_id, link):
            link.ended(ticket.ticket_id)
            link.post(Drop(ticket.ticket_id, "the ticket ended while it was being opened"))
        if error is not None and self._drop_failed(ticket.ticket_id):
            self._settings.events.failed(ticket.ticket_id, error)

    def _on_acked(self, ticket_id: str, stats: SendStats) -> None:
        whole = self._routes.acked(ticket_id, stats)
        if whole is not None:
            self._settings.events.acked(ticket_id, whole)

    def _drop_failed(self, ticket_id: str) -> bool:
        """Remove a failed ticket; every link it uses drops it, whichever link it failed on."""
        links = self._routes.take(ticket_id)
        for link in links or ():
            link.post(Drop(ticket_id, "the hand-off failed on another link"))
        return links is not None

    def _receivers_of(self, num_receivers: int) -> tuple[int, ...]:
        known = self._receivers.get(num_receivers)
        if known is None:
            layout = self._settings.memory.layout
            known = receivers_of(layout.model_tensors, layout.rank, num_receivers)
            self._receivers[num_receivers] = known
        return known

    def _peer(self, key: PeerKey) -> Peer:
        """Return the peer, and retire the other processes of its instance: they end with their tickets.

        Epochs are random numbers, so the one that appeared last counts as the newest, until it has no link and an older
        one is requested.
        """
        self._forget_gone()
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = Peer(self._settings, key, self._link_epochs)
        epochs = self._epochs.setdefault(key.instance_id, deque(maxlen=_REMEMBERED_EPOCHS))
        if epochs and epochs[-1] == key.epoch:
            return peer
        newest = self._peers.get(replace(key, epoch=epochs[-1])) if epochs else None
        if key.epoch in epochs and newest is not None and not newest.lost:
            peer.retire()
            return peer
        if key.epoch in epochs:
            epochs.remove(key.epoch)
        epochs.append(key.epoch)
        peer.revive()
        for other in self._peers.values():
            if other.key.instance_id == key.instance_id and other.key.epoch != key.epoch:
                other.retire()
        return peer

    def _forget_gone(self) -> None:
        for key, peer in list(self._peers.items()):
            if peer.over:
                del self._peers[key]
                self._bytes_of_gone += peer.bytes_sent
                self._resent_of_gone += peer.frames_resent
                self._keep_counts(key, peer.status())

    def _keep_counts(self, gone: PeerKey, status: LinkStatus) -> None:
        """Add the counts of a forgotten peer to another peer of its instance; drop them if there is no other."""
        others = [key for key in self._peers if key.instance_id == gone.instance_id]
        if others:
            self._peers[max(others, key=lambda key: key.rank == gone.rank)].remember(status)
        else:
            self._epochs.pop(gone.instance_id, None)


def close_senders(senders: Sequence[RankSender]) -> None:
    """Abort everything of all ranks and join their threads together."""
    join_all([link for sender in senders for link in sender.end()], _JOIN_S)
