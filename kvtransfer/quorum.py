"""Rank 0's ledger of the tickets: every rank reports on its share, and only rank 0 settles tickets, on all ranks.

    each rank -> quorum    share_ready, share_ended, share_released
    quorum -> each rank    reserve, settle(None) = committed | settle(error) = ended

A ready share waits for `settle`; until then its errors are reported, not acted upon. The first decision is final:
committed when the last share is ready and the owner accepts the prompt, ended at the first error. The owner is
notified of an end when no rank moves bytes of the ticket any more. An instance with one rank works in the same way.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtransfer.interface import ReceiverEvents
from processes.failpoints import Failpoints
from telemetry.logs import EventLogger
from wire.errors import HandoffFailed, InternalError, PdserveError, Unavailable

_log = EventLogger("kvtransfer")


class ShareReports(Protocol):
    """A rank's reports to rank 0, each at most once per ticket except `share_ended`. The caller holds no lock."""

    def share_ready(self, rank: int, ticket_id: str, description: bytes, kv_bytes: int) -> None:
        """All frames of this rank's share are received and verified."""
        ...

    def share_ended(self, ticket_id: str, error: PdserveError) -> None:
        """A share ended, or failed after it was ready."""
        ...

    def share_released(self, ticket_id: str) -> None:
        """A share has ended and no bytes are moved for it any more."""
        ...

    def progress(self, ticket_id: str) -> int:
        """Return a number that grows while bytes are received for the ticket on any rank."""
        ...

    def catch_up(self) -> None:
        """Handle rank 0's messages so far: a ticket that a sender names was reserved before the sender knew of it."""
        ...


class TicketLedger(ShareReports, Protocol):
    """The ledger of tickets as a rank's receiver uses it: rank 0's own, or messages to it (rank_transfer.py)."""

    def join(self, shares: "Shares") -> None:
        """Add a rank."""
        ...

    def reserve(self, ticket_id: str, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> None:
        """Open a ticket on every rank."""
        ...

    def abort(self, ticket_id: str, reason: str) -> None:
        """End a ticket on every rank."""
        ...

    def close(self, reason: str) -> None:
        """Open no more tickets."""
        ...


class Shares(Protocol):
    """Rank 0's calls to a rank (ticket_table.TicketTable)."""

    def check(self, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> None:
        """Raise ValueError for inconsistent numbers."""
        ...

    def reserve(self, ticket_id: str, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> None:
        """Open this rank's share of a ticket, with numbers that were checked."""
        ...

    def progress(self, ticket_id: str) -> int:
        """Return a number that grows while bytes are received for the rank's share of a ticket."""
        ...

    def settle(self, ticket_id: str, error: PdserveError | None) -> None:
        """Commit the ticket (None) or end it, on every rank, and notify the senders. Idempotent."""
        ...


@dataclass(slots=True)
class _Entry:
    block_ids: tuple[int, ...]
    kv_bytes: int = 0
    description: bytes = b""
    num_ready: int = 0
    num_released: int = 0
    settled: bool = False
    error: PdserveError | None = None
    reason: str | None = None


@dataclass(slots=True)
class Quorum:
    """Owner of the decision on each ticket, under a lock that is not held during calls."""

    events: ReceiverEvents
    failpoints: Failpoints
    shares: list[Shares] = field(default_factory=list)
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _closed: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def join(self, shares: Shares) -> None:
        """Add a rank, in the order of ranks and before the first ticket."""
        self.shares.append(shares)

    def reserve(self, ticket_id: str, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> None:
        """Open a ticket on every rank. It may already have ended when this returns; then its owner has been notified.

        Raises ValueError for inconsistent numbers or an id in use, Unavailable once the quorum is closed.
        """
        blocks = tuple(block_ids)
        for share in self.shares:
            share.check(num_tokens, first_token, blocks)
        with self._lock:
            if self._closed is not None:
                raise Unavailable(f"no more tickets are opened: {self._closed}")
            if ticket_id in self._entries:
                raise ValueError(f"ticket {ticket_id} already exists")
            entry = self._entries[ticket_id] = _Entry(blocks)
        try:
            for share in self.shares:
                share.reserve(ticket_id, num_tokens, first_token, blocks)
        except BaseException:
            with self._lock:
                self._entries.pop(ticket_id, None)
            for share in self.shares:
                share.settle(ticket_id, HandoffFailed("the ticket could not be opened on every rank"))
            raise
        with self._lock:
            error = entry.error
        if error is not None:  # the ticket ended in the meantime: settle also the ranks that had no share by then
            try:
                self._report_outcome(ticket_id, entry, error)
            except Exception as failure:  # noqa: BLE001  the ticket is open, and owns the blocks
                _log.error("kv_ticket_abort_failed", failure, ticket=ticket_id)

    def abort(self, ticket_id: str, reason: str) -> None:
        """End a ticket from this side. Does nothing for one that is settled."""
        self.share_ended(ticket_id, HandoffFailed(reason))

    def close(self, reason: str) -> None:
        """End every ticket and open no more."""
        with self._lock:
            self._closed = self._closed or reason
            ticket_ids = list(self._entries)
        for ticket_id in ticket_ids:
            self.abort(ticket_id, reason)

    def share_ready(self, rank: int, ticket_id: str, description: bytes, kv_bytes: int) -> None:
        """See ShareReports; the last one commits."""
        with self._lock:
            entry = self._entries.get(ticket_id)
            if entry is None or entry.settled:
                return
            entry.num_ready += 1
            entry.kv_bytes += kv_bytes
            if rank == 0:
                entry.description = description
            if entry.num_ready < len(self.shares):
                return
            entry.settled = True
        refusal = self._offer_commit(ticket_id, entry)
        if refusal is None:
            with self._lock:
                del self._entries[ticket_id]
        self._report_outcome(ticket_id, entry, refusal)

    def share_ended(self, ticket_id: str, error: PdserveError) -> None:
        """See ShareReports; the first one ends the ticket on every rank."""
        with self._lock:
            entry = self._entries.get(ticket_id)
            if entry is None or entry.settled:
                return
            entry.settled, entry.error = True, error
        self._report_outcome(ticket_id, entry, error)

    def share_released(self, ticket_id: str) -> None:
        """See ShareReports; after the last one the owner gets the blocks back."""
        with self._lock:
            entry = self._entries.get(ticket_id)
            if entry is None:
                return
            entry.num_released += 1
        self._end_if_free(ticket_id, entry)

    def progress(self, ticket_id: str) -> int:
        """See ShareReports."""
        return sum(share.progress(ticket_id) for share in self.shares)

    def catch_up(self) -> None:
        """See ShareReports: calls take effect at once here, so there is nothing to do."""

    def _offer_commit(self, ticket_id: str, entry: _Entry) -> PdserveError | None:
        try:
            description = entry.description[:-1] if self.failpoints.hit("kv.before_commit") else entry.description
            self.events.committed(ticket_id, description, entry.block_ids, entry.kv_bytes)
        except PdserveError as error:
            return error
        except Exception as error:  # noqa: BLE001  a defect in the owner ends this ticket only
            _log.error("kv_commit_failed", error, ticket=ticket_id)
            return InternalError(f"the commit of ticket {ticket_id} failed: {error}")
        return None

    def _report_outcome(self, ticket_id: str, entry: _Entry, error: PdserveError | None) -> None:
        failure: Exception | None = None
        for share in self.shares:
            try:
                share.settle(ticket_id, error)
            except Exception as reason:  # noqa: BLE001  an error at one rank must not block the others
                failure = failure or reason
        if error is not None:
            entry.reason = str(error)
            self._end_if_free(ticket_id, entry)
        if failure is not None:
            raise failure

    def _end_if_free(self, ticket_id: str, entry: _Entry) -> None:
        with self._lock:
            if entry.reason is None or entry.num_released < len(self.shares):
                return
            if self._entries.pop(ticket_id, None) is None:
                return
        _log.info("kv_ticket_ended", ticket=ticket_id, reason=entry.reason)
        try:
            self.events.ended(ticket_id, entry.block_ids, entry.reason)
        except Exception as error:  # noqa: BLE001  a defect in the owner must not keep other tickets open
            _log.error("kv_ticket_end_not_handled", error, ticket=ticket_id)
