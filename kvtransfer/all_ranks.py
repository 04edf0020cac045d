"""An instance's ranks as one sender and one receiver, so that the workers need not know the number of ranks.

    prefill_worker -> RanksSender -> KvSender of each rank ==links==> KvReceiver of each rank -> Quorum -> decode_worker

A ticket is acked when all receiving ranks have acked the part of every sending rank, and fails with the first part
that fails. A rank whose pool is on a device of its own process is reached by messages (far_rank.py); all others run
in rank 0's process. An instance with one rank uses that rank's own sender.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvtransfer.interface import PoolMemory, ReceiverEvents, SenderEvents, SendStats
from kvtransfer.quorum import Quorum
from kvtransfer.rank_ends import RankReceiver, RankSender
from kvtransfer.ranks import count_ranks, receivers_of
from kvtransfer.receiver import KvReceiver, close_receivers
from kvtransfer.receiver_counts import ReceiverCounts
from kvtransfer.sender import close_senders
from kvtransfer.totals import add_counts, merge_links, merge_stats
from processes.failpoints import Failpoints
from wire.errors import Incompatible, PdserveError
from wire.load import LinkStatus
from wire.types import KvEndpoint, Ticket

MakeSender = Callable[[PoolMemory, SenderEvents], RankSender]
MakeReceiver = Callable[[PoolMemory, Quorum], RankReceiver]


def make_sender(memories: Sequence[PoolMemory], events: SenderEvents, make: MakeSender) -> "RankSender | RanksSender":
    """Return the sender over the pools of all ranks, in their order."""
    return make(memories[0], events) if len(memories) == 1 else RanksSender(memories, events, make)


def make_receiver(
    memories: Sequence[PoolMemory], events: ReceiverEvents, failpoints: Failpoints, make: MakeReceiver
) -> "RanksReceiver":
    """Return the receiver over the pools of all ranks, in their order."""
    return RanksReceiver(memories, events, failpoints, make)


@dataclass(slots=True)
class _Sent:
    """One ticket: the ranks that send for it, and the statistics of those whose part was acked."""

    ranks: tuple[int, ...]
    acked: dict[int, SendStats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The sending ranks for a given number of receiving ranks; `speaker` sends the description to receiving rank 0."""

    ranks: tuple[int, ...]
    speaker: int


class RanksSender:
    """Implements interface.Sender. Owner of the ranks' senders and of the unacked parts of each ticket."""

    def __init__(self, memories: Sequence[PoolMemory], events: SenderEvents, make: MakeSender) -> None:
        self._events = events
        self._layouts = [memory.layout for memory in memories]
        self._senders = [make(memory, _RankEvents(self, rank)) for rank, memory in enumerate(memories)]
        self._plans: dict[int, _Plan] = {}
        self._tickets: dict[str, tuple[_Sent, _Plan]] = {}
        self._lock = threading.Lock()

    @property
    def bytes_sent(self) -> int:
        """KV bytes announced by all ranks."""
        return sum(sender.bytes_sent for sender in self._senders)

    @property
    def frames_resent(self) -> int:
        """Frames that were sent again."""
        return sum(sender.frames_resent for sender in self._senders)

    def begin(self, ticket: Ticket) -> None:
        """Open the ticket on the links of every rank that sends for it."""
        try:
            plan = self._plan(count_ranks(ticket.endpoints))
        except Incompatible as error:
            self._events.failed(ticket.ticket_id, error)
            return
        with self._lock:
            if ticket.ticket_id in self._tickets:
                return
            self._tickets[ticket.ticket_id] = _Sent(plan.ranks), plan
        for rank in plan.ranks:
            self._senders[rank].begin(ticket)
            if ticket.ticket_id not in self._tickets:  # failed before this rank had begun
                self._senders[rank].abort(ticket.ticket_id, "the part of another rank failed")

    def put(self, ticket_id: str, layer: int, start: int, end: int, block_ids: Sequence[int]) -> None:
        """Queue the frames of every rank: block ids are the same on all ranks."""
        for sender in self._senders_of(ticket_id):
            sender.put(ticket_id, layer, start, end, block_ids)

    def commit(self, ticket_id: str, description: bytes) -> None:
        """Commit every rank's part."""
        known = self._tickets.get(ticket_id)
        if known is not None:
            for rank in known[0].ranks:
                self._senders[rank].commit(ticket_id, description if rank == known[1].speaker else b"")

    def abort(self, ticket_id: str, reason: str) -> None:
        """End the ticket on every rank. Emits no event."""
        with self._lock:
            known = self._tickets.pop(ticket_id, None)
        for rank in known[0].ranks if known is not None else ():
            self._senders[rank].abort(ticket_id, reason)

    def links(self) -> tuple[LinkStatus, ...]:
        """Return the current links, one status per peer."""
        return merge_links([one for sender in self._senders for one in sender.links_of_ranks()])

    def measure(
        self, peer_id: str, epoch: int, endpoints: Sequence[KvEndpoint], num_bytes: int, timeout_s: float
    ) -> LinkStatus:
        """Measure the link of the rank that sends the description; see KvSender.measure."""
        plan = self._plan(count_ranks(endpoints))
        return self._senders[plan.speaker].measure(peer_id, epoch, endpoints, num_bytes, timeout_s)

    def sweep(self) -> None:
        """Check the leases of every link now."""
        for sender in self._senders:
            sender.sweep()

    def close(self) -> None:
        """Abort everything and join the threads."""
        with self._lock:
            self._tickets.clear()
        close_senders(self._senders)

    def rank_acked(self, rank: int, ticket_id: str, stats: SendStats) -> None:
        """Record that one rank's part was acked; the last one completes the ticket."""
        with self._lock:
            known = self._tickets.get(ticket_id)
            if known is None:
                return
            sent = known[0]
            sent.acked[rank] = stats
            if len(sent.acked) < len(sent.ranks):
                return
            del self._tickets[ticket_id]
        self._events.acked(ticket_id, merge_stats([*sent.acked.values()]))

    def rank_failed(self, rank: int, ticket_id: str, error: PdserveError) -> None:
        """Fail the ticket because one rank's part failed, and abort the others."""
        with self._lock:
            known = self._tickets.pop(ticket_id, None)
        if known is None:
            return
        for other in known[0].ranks:
            if other != rank:
                self._senders[other].abort(ticket_id, f"rank {rank}: {error}")
        self._events.failed(ticket_id, error)

    def _senders_of(self, ticket_id: str) -> list[RankSender]:
        known = self._tickets.get(ticket_id)
        return [] if known is None else [self._senders[rank] for rank in known[0].ranks]

    def _plan(self, num_receivers: int) -> _Plan:
        plan = self._plans.get(num_receivers)
        if plan is None:
            targets = [receivers_of(layout.model_tensors, layout.rank, num_receivers) for layout in self._layouts]
            ranks = tuple(rank for rank, those in enumerate(targets) if those)
            plan = self._plans[num_receivers] = _Plan(ranks, next(rank for rank in ranks if 0 in targets[rank]))
        return plan


@dataclass(frozen=True, slots=True)
class _RankEvents:
    """One rank's event sink."""

    owner: RanksSender
    rank: int

    def acked(self, ticket_id: str, stats: SendStats) -> None:
        self.owner.rank_acked(self.rank, ticket_id, stats)

    def failed(self, ticket_id: str, error: PdserveError) -> None:
        self.owner.rank_failed(self.rank, ticket_id, error)


class RanksReceiver:
    """Implements interface.Receiver. Owner of the ranks' receivers under one quorum."""

    def __init__(
        self, memories: Sequence[PoolMemory], events: ReceiverEvents, failpoints: Failpoints, make: MakeReceiver
    ) -> None:
        quorum = Quorum(events, failpoints)
        self._receivers: list[RankReceiver] = []
        with contextlib.ExitStack() as undo:
            for memory in memories:
                self._receivers.append(make(memory, quorum))
                undo.callback(self._receivers[-1].close)
            undo.pop_all()
        first = self._receivers[0]
        assert isinstance(first, KvReceiver), "rank 0 runs in this process, and makes the tickets"
        self._first = first
        self._endpoints = tuple(endpoint for receiver in self._receivers for endpoint in receiver.endpoints)

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Endpoints at which senders reach each rank, best first."""
        return self._endpoints

    @property
    def counts(self) -> ReceiverCounts:
        """Counts of what was received so far, over all ranks."""
        return add_counts([receiver.counts for receiver in self._receivers])

    @property
    def bytes_received(self) -> int:
        """KV bytes copied into the pools."""
        return sum(receiver.bytes_received for receiver in self._receivers)

    def open(self, ticket_id: str, *, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> Ticket:
        """Open a ticket on every rank. Raises ValueError for inconsistent numbers."""
        ticket = self._first.open(
            ticket_id, num_tokens=num_tokens, first_token=first_token, block_ids=block_ids
        )  # fmt: skip
        return replace(ticket, endpoints=self._endpoints)

    def abort(self, ticket_id: str, reason: str) -> None:
        """End a ticket on every rank; its senders are notified."""
        self._first.abort(ticket_id, reason)

    def sweep(self, now: float | None = None) -> None:
        """End the tickets whose lease has expired."""
        for receiver in self._receivers:
            receiver.sweep(now)

    def close(self) -> None:
        """Abort everything, stop listening, join the threads."""
        close_receivers(self._receivers)
