"""One rank's shares of the tickets: applies links' messages to their state machines and moves frames into slots."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields

from kvtransfer.arrivals import Arrivals
from kvtransfer.device_memory import region_of
from kvtransfer.digest import digest_of
from kvtransfer.inflow import FrameVerdict, MoveResult, SendingRank
from kvtransfer.interface import PoolMemory
from kvtransfer.link_messages import Abort, Ack, Commit, Frame, Held, Nack, Open, Read, Renew, TicketMessage
from kvtransfer.past_tickets import PastTickets
from kvtransfer.quorum import ShareReports
from kvtransfer.ranks import Senders
from kvtransfer.receiver_counts import ReceiverCounts
from kvtransfer.slots import SlotMap
from kvtransfer.suspect_frames import SuspectFrames
from kvtransfer.ticket import ReceiverTicket
from kvtransfer.transport_interface import Inlet
from processes.failpoints import Failpoints
from telemetry.logs import EventLogger
from wire.errors import HandoffFailed, PdserveError, to_name
from wire.kv_layout import Heads

_log = EventLogger("kvtransfer")


class TicketTable:
    """Owner of this rank's share of every ticket, under one lock that is not held during I/O and callbacks.

    `answer(link, message)` sends to a link's sender without blocking. Implements quorum.Shares: rank 0 opens and
    settles tickets, and gets each error through `quorum`.
    """

    def __init__(
        self, *, epoch: int, memory: PoolMemory, quorum: ShareReports, clock: Callable[[], float],
        lease_s: float, failpoints: Failpoints, answer: Callable[[int, TicketMessage], None],
    ) -> None:  # fmt: skip
        self._epoch, self._quorum, self._clock, self._lease_s = epoch, quorum, clock, lease_s
        self._failpoints, self._answer = failpoints, answer
        self._slots = SlotMap(memory.layout, region_of(memory))
        self._rank = memory.layout.rank
        self._senders = Senders(memory.layout.model_tensors, self._rank)
        self._sources: dict[int, SendingRank] = {}
        self._receipts: set[int] = set()
        self._arrivals, self._suspects = Arrivals(), SuspectFrames()
        self._tickets: dict[str, ReceiverTicket] = {}
        self._past = PastTickets()
        self._counts = {field.name: 0 for field in fields(ReceiverCounts)}
        self._lock = threading.Lock()

    @property
    def counts(self) -> ReceiverCounts:
        """The current counts."""
        with self._lock:
            return ReceiverCounts(**self._counts)

    def check(self, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> None:
        """Raise ValueError for inconsistent numbers."""
        layout = self._slots.layout
        if not 0 <= first_token <= num_tokens or len(block_ids) < layout.num_blocks_for(num_tokens):
            raise ValueError(
                f"tokens [{first_token}, {num_tokens}) do not fit; the number of blocks is {len(block_ids)}"
            )
        if any(not 0 <= block < layout.num_blocks for block in block_ids):
            raise ValueError(
                f"block ids are {min(block_ids)} to {max(block_ids)}, but must be 0 to {layout.num_blocks - 1}"
            )

    def reserve(self, ticket_id: str, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> None:
        """Open this rank's share of a ticket. Raises ValueError for an id in use."""
        ticket = ReceiverTicket(
            ticket_id, self._epoch, self._senders, num_tokens=num_tokens, first_token=first_token,
            block_ids=tuple(block_ids), lease_s=self._lease_s, now=self._clock(),
        )  # fmt: skip
        with self._lock:
            if ticket_id in self._tickets or self._past.is_committed(ticket_id):
                raise ValueError(f"ticket {ticket_id} already exists")
            self._tickets[ticket_id] = ticket

    def progress(self, ticket_id: str) -> int:
        """Return a number that grows while bytes are received for this rank's share of a ticket."""
        ticket = self._tickets.get(ticket_id)
        return 0 if ticket is None else ticket.progress

    def settle(self, ticket_id: str, error: PdserveError | None) -> None:
        """Apply rank 0's decision: committed (None) or ended. Notifies the senders; idempotent."""
        ticket = self._tickets.get(ticket_id)
        if ticket is None:
            return
        with self._lock:
            if ticket.committing:
                ticket.settle(None if error is None else str(error))
                settled = True
                if error is None:
                    self._past.committed(ticket_id)  # first: links read it without the lock
                    del self._tickets[ticket_id]
            else:
                settled = error is not None and ticket.abort(str(error))
        if error is not None:
            if settled:
                self._send_end(ticket, error)
            self._release(ticket)
        elif settled:
            self._send_commit(ticket)

    def add_link(
        self, link: int, source: SendingRank, *, receipts: bool = False, received: Callable[[], int] | None = None
    ) -> None:  # fmt: skip
        """Register a link that is ready, with its sender; `received` returns the bytes received over its stream.

        `receipts` is for links on which nothing proves that the bytes read from the sender's pool are those announced:
        a ticket is committed only after the sender has confirmed that it held the blocks until all was read.
        """
        self._sources[link] = source
        if received is not None:
            self._arrivals.add_link(link, received)
        if receipts:
            self._receipts.add(link)

    def arriving(self, link: int) -> AbstractContextManager[None]:
        """Mark the link as busy with a frame of no ticket, such as a probe's: meanwhile nothing else can arrive."""
        return self._arrivals.frame(link)

    def handle(self, link: int, message: TicketMessage, inlet: Inlet) -> None:
        """Apply one message of a link, on that link's thread. Raises LinkLost, WireError."""
        match message:
            case Frame():
                with self._arrivals.frame(link):
                    self._frame(link, message, inlet)
            case Open():
                self._open(link, message)
            case Commit():
                self._commit(link, message)
            case Held():
                self._on_held(link, message)
            case Renew():
                self._with_ticket(link, message, lambda ticket: self._renew_lease(ticket, link))
            case Abort():
                self.count(dropped_frames=self._suspects.aborted(message.ticket_id, link))
                self._with_ticket(link, message, lambda ticket: self._end(ticket, message.reason, except_link=link))

    def lost(self, link: int, reason: str) -> None:
        """End all tickets of a lost link."""
        self._sources.pop(link, None)
        self._receipts.discard(link)
        self.count(corrupt_frames=self._suspects.lost(link))
        self._arrivals.lost(link)
        for ticket in self._all_tickets():
            if link in ticket.links:
                self._end(ticket, reason, except_link=link)

    def sweep(self, now: float) -> None:
        """End the tickets whose lease has expired; renew the leases of the others' senders if there is progress."""
        for link in self._arrivals.moving():
            with self._lock:
                for ticket in self._tickets.values():
                    ticket.arrives(link, now)
        for ticket in self._all_tickets():
            with self._lock:
                expired = ticket.expire(now)
            if expired:
                self._end_ticket(ticket, HandoffFailed(f"ticket expired on the receiver: {ticket.reason}"))
            else:
                self._send_progress(ticket, now)

    def count(self, **added: int) -> None:
        """Add to the counts."""
        with self._lock:
            for name, number in added.items():
                self._counts[name] += number

    def _open(self, link: int, message: Open) -> None:
        ticket, source = self._tickets.get(message.ticket_id), self._sources[link]
        if ticket is None:
            self._quorum.catch_up()
            ticket = self._tickets.get(message.ticket_id)
        if ticket is None or message.epoch != self._epoch:
            self._answer_unknown(link, message)
            return
        try:
            with self._lock:
                ticket.open(
                    link, source, message.num_tokens, message.first_token, self._clock(),
                    receipt=link in self._receipts,
                )  # fmt: skip
        except HandoffFailed as error:
            if ticket.accepts_from(link):
                self._end(ticket, str(error), except_link=link)
            self._answer(link, _abort(message, error))

    def _renew_lease(self, ticket: ReceiverTicket, link: int) -> None:
        with self._lock:
            ticket.renew(link, self._clock())
        self.count(renewals=1)

    def _frame(self, link: int, frame: Frame, inlet: Inlet) -> None:
        ticket, verdict = self._tickets.get(frame.ticket_id), FrameVerdict.DROP
        if ticket is not None:
            try:
                with self._lock:
                    verdict = ticket.accept(frame, link)
            except HandoffFailed as error:
                self._end(ticket, str(error))
        if self._suspects.is_resent(frame.ticket_id, link, frame.number):
            _log.warning("kv_frame_corrupt", ticket=frame.ticket_id, frame=frame.number)
            self.count(corrupt_frames=1)
        if ticket is not None and verdict is FrameVerdict.MOVE:
            self._move(ticket, frame, link, inlet)
            return
        self.count(**{"duplicate_frames" if verdict is FrameVerdict.DUPLICATE else "dropped_frames": 1})
        inlet.skip(frame)

    def _move(self, ticket: ReceiverTicket, frame: Frame, link: int, inlet: Inlet) -> None:
        digest = None
        try:
            window = ticket.windows.of(ticket.block_ids, self._slots.layout.block_size, frame.start, frame.end)
            heads = Heads(frame.head_start, frame.head_end)
            target = self._slots.place(frame.tensor, window, heads, frame.num_tensors)
            digest = inlet.move(frame, target, ticket.stop)
        except HandoffFailed as error:
            self._end(ticket, str(error))
        finally:
            self._finish(ticket, frame, link, digest)
        if digest is None:
            inlet.skip(frame)
            return
        if ticket.proposed:
            self._try_commit(ticket)

    def _finish(self, ticket: ReceiverTicket, frame: Frame, link: int, digest: int | None) -> None:
        try:
            with self._lock:
                self._counts["bytes_received"] += frame.num_bytes if digest is not None else 0
                progress = ticket.finish(link, frame.number, digest, self._clock())
                if progress is MoveResult.REPEAT:
                    self._suspects.add(ticket.ticket_id, link, frame.number)
        except HandoffFailed as error:
            self.count(corrupt_frames=1)
            self._end(ticket, str(error))
            return
        if progress is MoveResult.REPEAT:
            _log.info("kv_frame_resend_requested", ticket=ticket.ticket_id, frame=frame.number)
            self._answer(link, Nack(ticket.ticket_id, ticket.epoch, frame.number))
        elif progress is MoveResult.OVER:
            self.count(dropped_frames=1)
            self._release(ticket)

    def _commit(self, link: int, commit: Commit) -> None:
        ticket = self._tickets.get(commit.ticket_id)
        if commit.epoch == self._epoch and self._past.is_committed(commit.ticket_id):
            self._answer(link, Ack(commit.ticket_id, commit.epoch))
            return
        if ticket is None or commit.epoch != self._epoch or link not in ticket.links:
            self._answer_unknown(link, commit)
            return
        try:
            if digest_of([commit.description]) != commit.description_digest:
                raise HandoffFailed("the commit's description is corrupt")
            with self._lock:
                ticket.propose(commit, link)
        except HandoffFailed as error:
            self._end(ticket, str(error))
            return
        self._try_commit(ticket)

    def _on_held(self, link: int, message: Held) -> None:
        ticket = self._tickets.get(message.ticket_id)
        if ticket is None:
            return
        with self._lock:
            taken = ticket.held(link, message.epoch)
        if taken:
            self._try_commit(ticket)

    def _try_commit(self, ticket: ReceiverTicket) -> None:
        """Report the share once it is complete; before that, request each missing receipt, once."""
        try:
            with self._lock:
                links = ticket.request_receipts(self._clock())
                ready = ticket.ready()
                if ready:
                    ticket.begin_commit()
        except HandoffFailed as error:
            self._end(ticket, str(error))
            return
        for link in links:
            self._answer(link, Read(ticket.ticket_id, ticket.epoch))
        if not ready:
            return
        self._quorum.share_ready(self._rank.number, ticket.ticket_id, ticket.description, ticket.kv_bytes)

    def _send_progress(self, ticket: ReceiverTicket, now: float) -> None:
        """Renew the leases of senders that are done while others are not, so that they do not assume that D is dead."""
        if not ticket.is_renewal_time(now):
            return
        progress = self._quorum.progress(ticket.ticket_id)
        with self._lock:
            links = ticket.renewals_due(now, progress)
        for link in links:
            self._answer(link, Renew(ticket.ticket_id, ticket.epoch))

    def _send_commit(self, ticket: ReceiverTicket) -> None:
        named = ticket.ticket_id[::-1] if self._failpoints.hit("kv.before_ack") else ticket.ticket_id
        for link in ticket.links:
            self._answer(link, Ack(named, ticket.epoch))
        self._failpoints.hit("kv.after_ack")

    def _end(self, ticket: ReceiverTicket, reason: str, *, except_link: int | None = None) -> None:
        """End a share, and with it the ticket; notify every sender except the one on `except_link`."""
        error = HandoffFailed(reason)
        with self._lock:
            ended, waits = ticket.abort(reason), ticket.committing
        if ended:
            self._end_ticket(ticket, error, except_link)
            return
        if waits:
            self._quorum.share_ended(ticket.ticket_id, error)
        self._release(ticket)

    def _end_ticket(self, ticket: ReceiverTicket, error: PdserveError, except_link: int | None = None) -> None:
        self._send_end(ticket, error, except_link)
        self._quorum.share_ended(ticket.ticket_id, error)
        self._release(ticket)

    def _release(self, ticket: ReceiverTicket) -> None:
        with self._lock:
            if not ticket.take_release():
                return
            self._past.ended(ticket.ticket_id, ticket.reason)
            del self._tickets[ticket.ticket_id]
        self._quorum.share_released(ticket.ticket_id)

    def _send_end(self, ticket: ReceiverTicket, error: PdserveError, except_link: int | None = None) -> None:
        for link in ticket.links:
            if link != except_link:
                self._answer(link, Abort(ticket.ticket_id, ticket.epoch, to_name(error), str(error)))

    def _answer_unknown(self, link: int, message: TicketMessage) -> None:
        error = HandoffFailed(self._past.why_not(message.ticket_id, message.epoch))
        self._answer(link, _abort(message, error))

    def _with_ticket(self, link: int, message: TicketMessage, act: Callable[[ReceiverTicket], None]) -> None:
        ticket = self._tickets.get(message.ticket_id)
        if ticket is not None and message.epoch == self._epoch and ticket.accepts_from(link):
            act(ticket)

    def _all_tickets(self) -> list[ReceiverTicket]:
        with self._lock:
            return list(self._tickets.values())


def _abort(message: TicketMessage, error: PdserveError) -> Abort:
    return Abort(message.ticket_id, message.epoch, to_name(error), str(error))
