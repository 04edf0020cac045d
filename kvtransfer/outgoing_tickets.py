"""The open tickets of one link: applies the callers' ops and the receiver's messages to their state machines."""

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from devices.interface import Event
from devices.polling import wait_until
from kvtransfer.device_memory import DeviceRegion, region_of
from kvtransfer.digest import RegionRuns, digest_of
from kvtransfer.framing import FrameRange, cut_frames
from kvtransfer.interface import SendStats
from kvtransfer.link_codec import encode
from kvtransfer.link_messages import Abort, Ack, Commit, Frame, Held, Nack, Open, Read, Renew, TicketMessage
from kvtransfer.link_ops import Begin, Drop, FinishTicket, LinkSettings, MessageReceived, Put, TicketOp
from kvtransfer.mover import process_mover
from kvtransfer.outbox import Outbox
from kvtransfer.ranks import part_between
from kvtransfer.sender_ticket import SenderState, SenderTicket
from kvtransfer.slots import BlockWindow, SlotMap, Windows
from kvtransfer.stream import LinkLost
from kvtransfer.terms import Terms
from kvtransfer.transport_interface import FRAME_BYTES, Outlet
from wire.errors import HandoffFailed, PdserveError, from_name, to_name
from wire.kv_layout import ONLY_RANK, Rank
from wire.types import Ticket


@dataclass(slots=True)
class _OpenTicket:
    ticket: SenderTicket
    started: float | None = None
    early_bytes: int = 0
    sent_at: float = -math.inf  # when bytes of it were last sent
    renewed_at: float = -math.inf  # when the receiver last renewed; set by the link's reader
    end_received: bool = False  # an ACK or ABORT is in the queue; set by the link's reader
    windows: Windows = field(default_factory=Windows)


class OutgoingTickets:
    """Owner of the tickets of one connection. Used by the link's writer thread, except its counters and `note`."""

    def __init__(
        self, settings: LinkSettings, outbox: Outbox, outlet: Outlet, transport: str, digests: bool,
        receiver: Rank = ONLY_RANK,
    ) -> None:  # fmt: skip
        """`receiver` is the rank of D at the other end, which is sent only its own heads."""
        self._settings, self._outbox, self._outlet = settings, outbox, outlet
        self._transport, self._digests = transport, digests
        self._slots = SlotMap(settings.memory.layout, region_of(settings.memory))
        self._mover = process_mover()
        self._layout = layout = settings.memory.layout
        self._part = part_between(layout.model_tensors, layout.rank, receiver)
        self._tensors_of = {layer: layout.tensors_of(layer) for layer in layout.layers}
        self._tickets: dict[str, _OpenTicket] = {}
        self._checked_at = settings.clock()
        self._sent_at = -math.inf
        self._batch_tickets, self._batch = set[str](), 0  # the tickets with data in this batch of the outbox
        outbox.watch(self._progressed)
        self.bytes_sent = 0
        self.frames_resent = 0

    @property
    def idle(self) -> bool:
        """Whether the link has no open ticket."""
        return not self._tickets

    def announced(self, ticket_id: str) -> int:
        """Return the KV bytes of a ticket that have been announced so far. Any thread."""
        entry = self._tickets.get(ticket_id)
        return 0 if entry is None else entry.ticket.kv_bytes

    def handle(self, op: TicketOp, *, more_queued: bool = False) -> None:
        """Apply one op; an error ends only the op's own ticket. Raises LinkLost.

        `more_queued`: more puts wait, so tensors share frames as large as possible, since each frame has a fixed cost.
        Otherwise frames are smaller, so that D moves one while P digests the next.
        """
        if isinstance(op, Begin):
            self._begin(op.ticket)
            return
        ticket_id = op.message.ticket_id if isinstance(op, MessageReceived) else op.ticket_id
        entry = self._tickets.get(ticket_id)
        if entry is None:
            if isinstance(op, MessageReceived) and isinstance(op.message, Read):
                self._send_abort(op.message, HandoffFailed(f"ticket {ticket_id} has ended on the sender"))
            return
        try:
            self._apply(entry, op, more_queued)
        except PdserveError as error:
            self._fail(entry, error)

    def note(self, message: TicketMessage) -> None:
        """Apply a message on the link's reader thread: it counts from now on, however late its op is handled."""
        entry = self._tickets.get(message.ticket_id)
        if entry is not None and isinstance(message, Renew):
            entry.renewed_at = self._settings.clock()
        elif entry is not None and isinstance(message, Ack | Abort):
            entry.end_received = True

    def check_leases(self) -> None:
        """Renew the leases while the engine makes progress, and end the tickets whose lease has expired."""
        self._checked_at = now = self._settings.clock()
        age = self._settings.progress_age
        for entry in list(self._tickets.values()):
            ticket = entry.ticket
            fresh = age() < ticket.lease_s / 2
            self._record_progress(entry, fresh=fresh)
            if not entry.end_received and ticket.expire(now):
                self._fail(
                    entry, HandoffFailed(f"ticket {ticket.ticket_id}: the lease of {ticket.lease_s:g} s expired")
                )
            elif ticket.renewal_due(now) and fresh and ticket.renew(now):
                self._outbox.add([encode(Renew(ticket.ticket_id, ticket.epoch))])

    def _record_progress(self, entry: _OpenTicket, *, fresh: bool) -> None:
        """Record what was sent since the last check: a thread blocked in a send cannot renew leases."""
        entry.ticket.progressed(entry.sent_at)
        if fresh and entry.ticket.state is not SenderState.SENT:
            entry.ticket.progressed(self._sent_at)
        if entry.renewed_at > -math.inf:
            entry.ticket.receiver_renewed(entry.renewed_at)

    def _progressed(self) -> None:
        """Record that bytes of the current batch were sent after a wait."""
        self._sent_at = self._settings.clock()
        for ticket_id in self._batch_tickets if self._batch == self._outbox.batch else ():
            self._mark_sent(ticket_id)

    def _mark_sent(self, ticket_id: str) -> None:
        entry = self._tickets.get(ticket_id)
        if entry is not None:
            entry.sent_at = self._sent_at

    def _add_to_batch(self, ticket_id: str) -> None:
        """Record that data of the ticket is added to the outbox."""
        if self._batch != self._outbox.batch:
            self._batch_tickets.clear()
            self._batch = self._outbox.batch
        self._batch_tickets.add(ticket_id)

    def abort_all(self, reason: str) -> None:
        """Notify the receiver that every ticket has ended. Raises LinkLost."""
        for entry in list(self._tickets.values()):
            self._abort(entry.ticket, HandoffFailed(reason))

    def fail_all(self, error: PdserveError, received: Sequence[MessageReceived]) -> None:
        """The link is gone: end every ticket, after handling the ACKs and ABORTs already received."""
        for op in received:
            if isinstance(op.message, Ack | Abort):
                with contextlib.suppress(LinkLost):
                    self.handle(op)
        for entry in list(self._tickets.values()):
            self._end(entry, error)

    def _begin(self, ticket: Ticket) -> None:
        if ticket.ticket_id in self._tickets:
            return
        terms = Terms(self._part, ticket.first_token, ticket.num_tokens)
        now = self._settings.clock()
        sender = SenderTicket(ticket.ticket_id, ticket.epoch, terms, lease_s=ticket.lease_s, now=now)
        self._tickets[ticket.ticket_id] = _OpenTicket(sender)
        self._outbox.add([encode(Open(ticket.ticket_id, ticket.epoch, ticket.num_tokens, ticket.first_token))])
        self._outbox.flush()  # from now on the receiver ends the ticket if this process dies

    def _apply(self, entry: _OpenTicket, op: Put | FinishTicket | Drop | MessageReceived, more_queued: bool) -> None:
        match op:
            case Put():
                self._put(entry, op, more_queued)
            case FinishTicket():
                self._finish(entry, op)
            case Drop():
                self._abort(entry.ticket, HandoffFailed(op.reason))
            case MessageReceived(Nack() as nack):
                self._resend_frame(entry.ticket, nack)
            case MessageReceived(Read() as read):
                self._confirm(entry, read)
            case MessageReceived(Ack()):
                self._handle_ack(entry)
            case MessageReceived(Abort() as abort):
                self._end(entry, from_name(abort.error, abort.reason))

    def _finish(self, entry: _OpenTicket, op: FinishTicket) -> None:
        """Commit only if the blocks were held until all was digested or, without digests, sent.

        An abort frees them before its Drop is handled here: data digested since then may be another prompt's.
        """
        if self._settings.catch_up is not None or not self._digests:
            self._outbox.flush()
        if not self._holds_blocks(entry):
            return  # its end is in the queue
        commit = entry.ticket.commit(op.description, digest_of([op.description]))
        if commit is not None:
            entry.early_bytes = op.early_bytes
            self._commit(commit)

    def _commit(self, commit: Commit) -> None:
        failpoints = self._settings.failpoints
        if failpoints.hit("kv.before_send_commit"):
            commit = replace(commit, description_digest=commit.description_digest ^ 1)
        self._add_to_batch(commit.ticket_id)
        self._outbox.add([encode(commit)])
        if failpoints:
            self._outbox.flush()  # the failpoint is after the commit was sent
            failpoints.hit("kv.after_send_commit")

    def _put(self, entry: _OpenTicket, put: Put, more_queued: bool) -> None:
        if entry.started is None:
            entry.started = time.monotonic()
        if put.mark is not None and not put.mark.is_done:
            self._outbox.flush()  # send what is complete before waiting for the mark
            self._wait_for_event(put.mark)
        ticket = entry.ticket
        tensors = sorted({tensor for layer in put.layers for tensor in self._tensors_of.get(layer, ())})  # may be empty
        wanted = ((tensor, ticket.wanted(tensor, put.start, put.end)) for tensor in tensors)
        max_bytes = self._outlet.max_frame_bytes
        shared_bytes = max_bytes if more_queued else FRAME_BYTES
        if self._settings.failpoints:
            shared_bytes = 0  # so that a failpoint can hit between tensors
        for cut in cut_frames(self._part, wanted, max_bytes, shared_bytes):
            if ticket.over or entry.end_received:
                return
            window = entry.windows.of(put.block_ids, self._layout.block_size, cut.start, cut.end)
            self._send(ticket, cut, window, put.mark)

    def _wait_for_event(self, mark: Event) -> None:
        """Wait until the work before the mark is done, renewing leases meanwhile. Raises LinkLost."""
        limit_s, interval_s = self._settings.timeouts.progress_s, self._settings.check_interval_s
        deadline = time.monotonic() + limit_s
        while not wait_until(lambda: mark.is_done, max(0.0, min(interval_s, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise LinkLost(f"the KV to be sent was not computed within {limit_s:g} s")
            self.check_leases()

    def _send(self, ticket: SenderTicket, cut: FrameRange, window: BlockWindow, mark: Event | None) -> None:
        source = self._place(cut.tensor, cut.num_tensors, window)
        if mark is not None and isinstance(source.region, DeviceRegion):
            source = source._replace(region=source.region.after(mark))
        digest = self._mover.digest(source) if self._digests else 0
        self._announce_frame(ticket.send(cut, digest, window.block_ids), source)

    def _resend_frame(self, ticket: SenderTicket, nack: Nack) -> None:
        frame = ticket.resend(nack.number)
        start = frame.start % self._layout.block_size
        window = BlockWindow(frame.block_ids, start, start + frame.end - frame.start)
        source = self._place(frame.tensor, frame.num_tensors, window)
        if isinstance(source.region, DeviceRegion):
            source = source._replace(region=source.region.complete())  # it was complete at its first read
        if self._digests and self._mover.digest(source) != frame.digest:
            raise HandoffFailed(f"the blocks of frame {frame.number} changed during the hand-off")
        self.frames_resent += 1
        self._announce_frame(frame, source)

    def _confirm(self, entry: _OpenTicket, read: Read) -> None:
        """Confirm that the blocks were held until the receiver had read them."""
        if not self._holds_blocks(entry):
            return
        ticket = entry.ticket
        if not ticket.holds(self._settings.clock()):
            raise HandoffFailed(
                f"ticket {ticket.ticket_id} is {ticket.state}: blocks are held only when all is sent, within the lease"
            )
        self._outbox.add([encode(Held(read.ticket_id, read.epoch))])

    def _holds_blocks(self, entry: _OpenTicket) -> bool:
        """Return whether the ticket's blocks are still held: rank 0 may have aborted the ticket in its own process.

        Raises HandoffFailed if rank 0 does not answer.
        """
        catch_up, ticket_id = self._settings.catch_up, entry.ticket.ticket_id
        if catch_up is not None and not catch_up():
            raise HandoffFailed(f"ticket {ticket_id}: rank 0 did not report whether it is still open")
        return not entry.end_received and self._settings.is_open(ticket_id)

    def _place(self, tensor: int, num_tensors: int, window: BlockWindow) -> RegionRuns:
        try:
            return self._slots.place(tensor, window, self._part.heads[tensor], num_tensors)
        except IndexError as error:
            raise HandoffFailed(
                f"the blocks that were put do not hold tokens [{window.start}, {window.end}): {error}"
            ) from error

    def _announce_frame(self, frame: Frame, source: RegionRuns) -> None:
        if self._settings.failpoints.hit("kv.send.mid"):
            frame = replace(frame, digest=frame.digest ^ 1)
        pieces = self._outlet.announce(frame, source)
        self._add_to_batch(frame.ticket_id)
        self._outbox.add(pieces, frame.num_bytes)
        self.bytes_sent += frame.num_bytes
        now = self._settings.clock()
        if now - self._checked_at > self._settings.check_interval_s:
            self._sent_at = now  # the stream accepted it after the wait
            self._mark_sent(frame.ticket_id)
            self.check_leases()  # a long put over a slow link must not expire the leases of others

    def _handle_ack(self, entry: _OpenTicket) -> None:
        ticket, now = entry.ticket, time.monotonic()
        if not ticket.ack():
            raise HandoffFailed("the receiver acked a ticket that was not committed")
        del self._tickets[ticket.ticket_id]
        started = now if entry.started is None else entry.started
        stats = SendStats(self._transport, ticket.kv_bytes, now - started, ticket.resent_frames, entry.early_bytes)
        self._settings.acked(ticket.ticket_id, stats)

    def _fail(self, entry: _OpenTicket, error: PdserveError) -> None:
        self._abort(entry.ticket, error)
        if self._settings.claim(entry.ticket.ticket_id):
            self._settings.events.failed(entry.ticket.ticket_id, error)

    def _abort(self, ticket: SenderTicket, error: PdserveError) -> None:
        ticket.abort()
        self._send_abort(ticket, error)
        self._tickets.pop(ticket.ticket_id, None)  # last: if sending loses the link, `fail_all` ends it

    def _send_abort(self, ticket: SenderTicket | Read, error: PdserveError) -> None:
        self._outbox.add([encode(Abort(ticket.ticket_id, ticket.epoch, to_name(error), str(error)))])

    def _end(self, entry: _OpenTicket, error: PdserveError) -> None:
        entry.ticket.abort()
        self._tickets.pop(entry.ticket.ticket_id, None)
        if self._settings.claim(entry.ticket.ticket_id):
            self._settings.events.failed(entry.ticket.ticket_id, error)
