"""The receiver's tickets: applies what links announce to their state machines and moves frames into the slots."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from kvtransfer.digest import digest_of
from kvtransfer.frame import Abort, Ack, Commit, Frame, Nack, Open, Renew, TicketMessage
from kvtransfer.interface import PoolMemory, ReceiverEvents
from kvtransfer.slots import SlotMap, window
from kvtransfer.ticket import Progress, ReceiverTicket, Verdict
from kvtransfer.transport import Inlet
from telemetry.logs import EventLogger
from wire.errors import HandoffFailed, InternalError, PdserveError, to_name
from wire.failpoints import Failpoints

_log = EventLogger("kvtransfer")
_REMEMBERED_COMMITS = 4_096


@dataclass(frozen=True, slots=True)
class ReceiverCounts:
    """What a receiver has seen since it started."""

    bytes_received: int = 0
    duplicate_frames: int = 0
    dropped_frames: int = 0
    corrupt_frames: int = 0
    refused_connections: int = 0
    renewals: int = 0


class TicketTable:
    """Owner of all receiver tickets, under one lock that no I/O and no callback runs in.

    `answer(link, message)` reaches the sender on a link without ever waiting.
    """

    def __init__(
        self, *, epoch: int, memory: PoolMemory, events: ReceiverEvents, clock: Callable[[], float],
        lease_s: float, failpoints: Failpoints, answer: Callable[[int, TicketMessage], None],
    ) -> None:  # fmt: skip
        self._epoch, self._events, self._clock, self._lease_s = epoch, events, clock, lease_s
        self._failpoints, self._answer = failpoints, answer
        self._slots = SlotMap(memory.layout, memory.buffer)
        self._tickets: dict[str, ReceiverTicket] = {}
        self._committed: OrderedDict[str, None] = OrderedDict()
        self._counts = {field.name: 0 for field in fields(ReceiverCounts)}
        self._lock = threading.Lock()

    @property
    def counts(self) -> ReceiverCounts:
        """The counts as they are now."""
        with self._lock:
            return ReceiverCounts(**self._counts)

    def reserve(self, ticket_id: str, num_tokens: int, first_token: int, block_ids: Sequence[int]) -> None:
        """Make a ticket. Raises ValueError for numbers that do not fit together."""
        layout, blocks = self._slots.layout, tuple(block_ids)
        if not 0 <= first_token <= num_tokens or len(blocks) < layout.num_blocks_for(num_tokens):
            raise ValueError(f"tokens [{first_token}, {num_tokens}) do not fit {len(blocks)} blocks")
        if any(not 0 <= block < layout.num_blocks for block in blocks):
            raise ValueError(f"blocks {min(blocks)}..{max(blocks)} are outside the pool of {layout.num_blocks}")
        ticket = ReceiverTicket(
            ticket_id, self._epoch, layout.tensors, num_tokens=num_tokens, first_token=first_token,
            block_ids=blocks, lease_s=self._lease_s, now=self._clock(),
        )  # fmt: skip
        with self._lock:
            if ticket_id in self._tickets or ticket_id in self._committed:
                raise ValueError(f"ticket {ticket_id} exists")
            self._tickets[ticket_id] = ticket

    def handle(self, link: int, message: TicketMessage, inlet: Inlet) -> None:
        """Apply one message of a link, on that link's thread. Raises LinkLost, WireError."""
        match message:
            case Frame():
                self._frame(link, message, inlet)
            case Open():
                self._open(link, message)
            case Commit():
                self._commit(link, message)
            case Renew():
                self._with_ticket(link, message, self._renew)
            case Abort():
                self._with_ticket(link, message, lambda ticket: self._end(ticket, message.reason, tell=False))

    def abort(self, ticket_id: str, reason: str) -> None:
        """End a ticket from this side; its sender hears it."""
        ticket = self._tickets.get(ticket_id)
        if ticket is not None:
            self._end(ticket, reason)

    def lost(self, link: int, reason: str) -> None:
        """End all tickets of a link that is gone."""
        for ticket in self._all():
            if ticket.link == link:
                self._end(ticket, reason, tell=False)

    def sweep(self, now: float) -> None:
        """End the tickets whose lease ran out."""
        for ticket in self._all():
            with self._lock:
                expired = ticket.expire(now)
            if expired:
                self._tell_end(ticket, HandoffFailed(f"ticket expired on the receiver: {ticket.reason}"))
                self._release(ticket)

    def abort_all(self, reason: str) -> None:
        """End every ticket."""
        for ticket in self._all():
            self._end(ticket, reason)

    def count(self, **added: int) -> None:
        """Add to the counts."""
        with self._lock:
            for name, number in added.items():
                self._counts[name] += number

    def _open(self, link: int, message: Open) -> None:
        ticket = self._tickets.get(message.ticket_id)
        if ticket is None or message.epoch != self._epoch:
            self._answer_unknown(link, message)
            return
        try:
            with self._lock:
                ticket.open(link, message.num_tokens, message.first_token, self._clock())
        except HandoffFailed as error:
            if ticket.link in (None, link):
                self._end(ticket, str(error), tell=False)
            self._answer(link, _abort(message, error))

    def _renew(self, ticket: ReceiverTicket) -> None:
        ticket.renew(self._clock())
        self.count(renewals=1)

    def _frame(self, link: int, frame: Frame, inlet: Inlet) -> None:
        ticket, verdict = self._tickets.get(frame.ticket_id), Verdict.DROP
        if ticket is not None:
            try:
                with self._lock:
                    verdict = ticket.accept(frame, link)
            except HandoffFailed as error:
                self._end(ticket, str(error))
        if ticket is not None and verdict is Verdict.MOVE:
            self._move(ticket, frame, inlet)
            return
        self.count(**{"duplicate_frames" if verdict is Verdict.DUPLICATE else "dropped_frames": 1})
        inlet.skip(frame)

    def _move(self, ticket: ReceiverTicket, frame: Frame, inlet: Inlet) -> None:
        digest = None
        where = window(ticket.block_ids, self._slots.layout.block_size, frame.start, frame.end)
        try:
            digest = inlet.move(frame, self._slots.place(frame.tensor, where), ticket.stop)
        except HandoffFailed as error:
            self._end(ticket, str(error))
        finally:
            self._finish(ticket, frame, digest)
        if digest is None:
            inlet.skip(frame)
            return
        self.count(bytes_received=frame.num_bytes)
        self._try_commit(ticket)

    def _finish(self, ticket: ReceiverTicket, frame: Frame, digest: int | None) -> None:
        try:
            with self._lock:
                progress = ticket.finish(frame.number, digest, self._clock())
        except HandoffFailed as error:
            self.count(corrupt_frames=1)
            self._end(ticket, str(error))
            return
        if progress is Progress.REPEAT:
            self.count(corrupt_frames=1)
            _log.warning("kv_frame_corrupt", ticket=ticket.ticket_id, frame=frame.number)
            self._answer(ticket.link or 0, Nack(ticket.ticket_id, ticket.epoch, frame.number))
        elif progress is Progress.OVER:
            self._release(ticket)

    def _commit(self, link: int, commit: Commit) -> None:
        ticket = self._tickets.get(commit.ticket_id)
        if commit.epoch == self._epoch and commit.ticket_id in self._committed:
            self._answer(link, Ack(commit.ticket_id, commit.epoch))
            return
        if ticket is None or commit.epoch != self._epoch or ticket.link != link:
            self._answer_unknown(link, commit)
            return
        try:
            if digest_of([commit.description]) != commit.description_digest:
                raise HandoffFailed("the commit's description arrived corrupt")
            with self._lock:
                ticket.propose(commit, link)
        except HandoffFailed as error:
            self._end(ticket, str(error))
            return
        self._try_commit(ticket)

    def _try_commit(self, ticket: ReceiverTicket) -> None:
        try:
            with self._lock:
                if not ticket.ready():
                    return
                ticket.begin_commit()
        except HandoffFailed as error:
            self._end(ticket, str(error))
            return
        refusal = self._offer(ticket)
        with self._lock:
            ticket.settle(None if refusal is None else str(refusal))
            if refusal is None:
                self._remember(ticket.ticket_id)
        if refusal is not None:
            self._tell_end(ticket, refusal)
            self._release(ticket)
            return
        named = ticket.ticket_id[::-1] if self._failpoints.hit("kv.before_ack") else ticket.ticket_id
        self._answer(ticket.link or 0, Ack(named, ticket.epoch))
        self._failpoints.hit("kv.after_ack")

    def _offer(self, ticket: ReceiverTicket) -> PdserveError | None:
        try:
            description = ticket.description[:-1] if self._failpoints.hit("kv.before_commit") else ticket.description
            self._events.committed(ticket.ticket_id, description, ticket.block_ids, ticket.kv_bytes)
        except PdserveError as error:
            return error
        except Exception as error:  # noqa: BLE001  a defect of the owner ends this ticket only
            _log.error("kv_commit_failed", exc=error, ticket=ticket.ticket_id)
            return InternalError(f"the commit of ticket {ticket.ticket_id} failed: {error}")
        return None

    def _remember(self, ticket_id: str) -> None:
        del self._tickets[ticket_id]
        self._committed[ticket_id] = None
        if len(self._committed) > _REMEMBERED_COMMITS:
            self._committed.popitem(last=False)

    def _end(self, ticket: ReceiverTicket, reason: str, *, tell: bool = True) -> None:
        with self._lock:
            ended = ticket.abort(reason)
        if ended and tell:
            self._tell_end(ticket, HandoffFailed(reason))
        self._release(ticket)

    def _release(self, ticket: ReceiverTicket) -> None:
        with self._lock:
            if not ticket.take_release():
                return
            del self._tickets[ticket.ticket_id]
        _log.info("kv_ticket_ended", ticket=ticket.ticket_id, state=ticket.state, reason=ticket.reason)
        try:
            self._events.ended(ticket.ticket_id, ticket.block_ids, ticket.reason)
        except Exception as error:  # noqa: BLE001  a defect of the owner must not keep other tickets from ending
            _log.error("kv_ended_failed", exc=error, ticket=ticket.ticket_id)

    def _tell_end(self, ticket: ReceiverTicket, error: PdserveError) -> None:
        if ticket.link is not None:
            self._answer(ticket.link, Abort(ticket.ticket_id, ticket.epoch, to_name(error), str(error)))

    def _answer_unknown(self, link: int, message: TicketMessage) -> None:
        error = HandoffFailed(f"ticket {message.ticket_id} of epoch {message.epoch:x} is unknown or over")
        self._answer(link, _abort(message, error))

    def _with_ticket(self, link: int, message: TicketMessage, act: Callable[[ReceiverTicket], None]) -> None:
        ticket = self._tickets.get(message.ticket_id)
        if ticket is not None and message.epoch == self._epoch and ticket.link in (None, link):
            act(ticket)

    def _all(self) -> list[ReceiverTicket]:
        with self._lock:
            return list(self._tickets.values())


def _abort(message: TicketMessage, error: PdserveError) -> Abort:
    return Abort(message.ticket_id, message.epoch, to_name(error), str(error))
