"""The sender's link to one rank of an instance: one connection from dial to end, with its queue and two threads.

callers --post--> queue --> writer thread: dials, digests, sends, renews leases; owns every ticket's state
                    ^------ reader thread: NACK, READ, ACK, ABORT of the receiver, and the end of the connection
                            (RENEW of the receiver is applied at once)

    connecting -> up -> draining -> down      draining: accepts no new ticket, closes after the last one
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvtransfer.dial import Dialled, dial
from kvtransfer.hello import Hello
from kvtransfer.link_messages import TicketMessage
from kvtransfer.link_ops import (
    Begin,
    CheckLeases,
    LinkOver,
    LinkSettings,
    Measure,
    MessageReceived,
    Op,
    PeerKey,
    ProbeAnswered,
    Put,
    merge_puts,
)
from kvtransfer.link_reader import LinkReader
from kvtransfer.outbox import Outbox
from kvtransfer.outgoing_tickets import OutgoingTickets
from kvtransfer.probe import SpeedProbe
from kvtransfer.stream import LinkLost, Stream
from kvtransfer.transport_interface import Transport
from telemetry.logs import EventLogger
from wire.errors import InstanceLost, InternalError, PdserveError
from wire.types import PROTOCOL_VERSION, KvEndpoint

_log = EventLogger("kvtransfer")
_MIN_GATHERED, _MAX_GATHERED = 4, 512


class LinkOwner(Protocol):
    """Callbacks on a link's state, on the link's own thread; none of the link's locks is held."""

    def dial_failed(self, transport: str, reason: str) -> None:
        """One transport was tried and failed."""
        ...

    def up(self, link: "Link") -> None:
        """The link accepts frames."""
        ...

    def down(self, link: "Link", error: PdserveError | None) -> None:
        """The link has ended and its tickets are about to end; `error` is None if this side closed it normally."""
        ...

    def tick(self) -> None:
        """Called periodically while the link is alive."""
        ...


class Link:
    """Owner of one connection of the sender. When it ends, every ticket begun on it ends too.

    It dials `transports` in their order. A `spare` link was made without a ticket.
    """

    def __init__(
        self, settings: LinkSettings, key: PeerKey, link_epoch: int, endpoints: Sequence[KvEndpoint],
        transports: Sequence[Transport], owner: LinkOwner, *, spare: bool = False,
    ) -> None:  # fmt: skip
        self.link_epoch, self.transports, self.spare = link_epoch, tuple(transports), spare
        self.transport = ""  # the one in use, set just before "up"
        self._settings, self._key, self._endpoints, self._owner = settings, key, endpoints, owner
        self._phase, self._draining = "connecting", False
        self._closing = False
        self._promised: dict[str, int] = {}
        self._load = 0
        self._queue: queue.SimpleQueue[Op] = queue.SimpleQueue()
        self._gathered: deque[Op] = deque()  # taken from the queue and not yet handled
        self._gather_ops = _MIN_GATHERED
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._reader: LinkReader | None = None
        self._tickets: OutgoingTickets | None = None
        self._probe: SpeedProbe | None = None
        self.thread = threading.Thread(target=self._run, name=f"kv-out-{key.instance_id}", daemon=True)

    @property
    def state(self) -> str:
        """One of connecting, up, draining, down."""
        return "draining" if self._draining and self._phase != "down" else self._phase

    @property
    def rank(self) -> int:
        """The receiver's rank."""
        return self._key.rank.number

    @property
    def load(self) -> int:
        """KV bytes of the tickets begun here that have not ended."""
        return self._load

    @property
    def bytes_sent(self) -> int:
        """KV bytes announced."""
        return 0 if self._tickets is None else self._tickets.bytes_sent

    @property
    def frames_resent(self) -> int:
        """Frames that were sent again."""
        return 0 if self._tickets is None else self._tickets.frames_resent

    def begin(self, op: Begin, num_bytes: int) -> bool:
        """Queue a ticket of `num_bytes`; return False if this link is down or draining and the caller needs another."""
        with self._lock:
            if self._phase == "down" or self._draining:
                return False
            self._promised[op.ticket.ticket_id] = num_bytes
            self._load += num_bytes
            self._queue.put(op)
            return True

    def measure(self, op: Measure) -> bool:
        """Queue a measurement; return False if the caller needs another link."""
        with self._lock:
            if self._phase == "down" or self._draining:
                return False
            self._queue.put(op)
            return True

    def ended(self, ticket_id: str) -> None:
        """Remove an ended ticket from the load."""
        with self._lock:
            self._load -= self._promised.pop(ticket_id, 0)

    def announced(self, ticket_id: str) -> int:
        """Return the KV bytes of a ticket that have been announced so far."""
        return 0 if self._tickets is None else self._tickets.announced(ticket_id)

    def post(self, op: Op) -> None:
        """Queue an op without blocking. After the link's end the op is dropped: the link's tickets have ended too."""
        self._queue.put(op)

    def drain(self) -> None:
        """Accept no new ticket, and close normally when the last one has ended."""
        with self._lock:
            self._draining = True
        self.post(CheckLeases())

    def end(self) -> None:
        """Close it normally: the receiver is notified of each ticket. This may first wait for a dial to finish."""
        self.post(LinkOver(None))
        if self._phase == "connecting" and self.spare:
            self.cut()

    def cut(self) -> None:
        """Close it at once: wake the threads that wait on the connection."""
        self._closing = True
        stream = self._stream
        if stream is not None:
            stream.shutdown()

    def check_open(self) -> None:
        """Stop the dial if the link was closed (dial.DialWatch)."""
        if self._closing:
            raise InstanceLost(f"the KV link to {self._key.instance_id} was closed")

    def connected(self, stream: Stream) -> None:
        """Record the dial's connection (dial.DialWatch)."""
        self._stream = stream

    def failed(self, transport: str, reason: str) -> None:
        """Report a failed transport; the dial continues with the next one (dial.DialWatch)."""
        self._owner.dial_failed(transport, reason)

    def _run(self) -> None:
        error: PdserveError | None
        try:
            error = self._run_until_end()
        except PdserveError as reason:
            error = reason
        except LinkLost as reason:
            error = InstanceLost(f"the KV link to {self._key.instance_id} is lost: {reason}")
        except Exception as reason:  # noqa: BLE001  the outermost frame of this link's thread
            _log.error("kv_link_failed", reason, peer=self._key.instance_id)
            error = InternalError(f"the KV link to {self._key.instance_id} failed: {reason}")
        self._shut_down(None if self._closing else error)

    def _run_until_end(self) -> PdserveError | None:
        dialled = dial(
            self.transports, self._endpoints, self._make_hello(), self._settings.timeouts, self._settings.trust, self
        )
        self._reader = LinkReader(
            dialled.stream, dialled.outlet, self._key.instance_id, post=self._queue.put, note=self._note_message,
        )  # fmt: skip
        self._reader.start()
        self.check_open()
        return self._serve(*self._open(dialled))

    def _note_message(self, message: TicketMessage) -> None:
        if self._tickets is not None:
            self._tickets.note(message)

    def _open(self, dialled: Dialled) -> tuple[OutgoingTickets, SpeedProbe, Outbox]:
        settings, outbox, digests = self._settings, Outbox(dialled.stream), dialled.digests
        tickets = OutgoingTickets(settings, outbox, dialled.outlet, dialled.transport, digests, self._key.rank)
        probe = SpeedProbe(settings, outbox, dialled.outlet, self._key.epoch, digests=digests)
        self._tickets, self._probe, self.transport = tickets, probe, dialled.transport
        with self._lock:
            self._phase = "up"
        _log.info("kv_link_up", peer=self._key.instance_id, transport=self.transport, link_epoch=self.link_epoch)
        self._owner.up(self)
        return tickets, probe, outbox

    def _serve(self, tickets: OutgoingTickets, probe: SpeedProbe, outbox: Outbox) -> PdserveError | None:
        while True:
            self._gather()
            while self._gathered:
                op = self._gathered.popleft()
                match op:
                    case LinkOver(error):
                        if error is None:
                            tickets.abort_all("the sender is shutting down")
                            outbox.flush()
                        return error
                    case Measure():
                        probe.start(op)
                    case ProbeAnswered():
                        probe.handle_answer(op)
                    case CheckLeases():
                        pass
                    case Put():
                        tickets.handle(op, more_queued=any(isinstance(one, Put) for one in self._gathered))
                    case _:
                        tickets.handle(op)
            tickets.check_leases()
            probe.check_deadline()
            outbox.flush()
            if self._draining and self._queue.empty() and tickets.idle and probe.idle:
                return None
            self._owner.tick()

    def _gather(self) -> None:
        """Take the queued ops: a few at first, so that the receiver has work while many are joined."""
        try:
            self._gathered.append(self._queue.get(timeout=self._settings.check_interval_s))
            while len(self._gathered) < self._gather_ops:
                self._gathered.append(self._queue.get_nowait())
            self._gather_ops = min(4 * self._gather_ops, _MAX_GATHERED)
        except queue.Empty:
            self._gather_ops = _MIN_GATHERED
        self._gathered = deque(merge_puts(self._gathered))

    def _shut_down(self, error: PdserveError | None) -> None:
        with self._lock:
            self._phase = "down"
        if error is not None:
            _log.warning("kv_link_down", peer=self._key.instance_id, transport=self.transport, error=error)
        self._owner.down(self, error)  # first: a failed ticket's owner may begin the next one at once
        self._hang_up()
        error = error or InstanceLost(f"the KV link to {self._key.instance_id} was closed")
        ops = [*self._gathered, *(self._queue.get_nowait() for _ in range(self._queue.qsize()))]
        if self._tickets is not None:
            self._tickets.fail_all(error, [op for op in ops if isinstance(op, MessageReceived)])
        if self._probe is not None:
            self._probe.fail(error)
        for op in ops:
            if isinstance(op, Begin) and self._settings.claim(op.ticket.ticket_id):
                self._settings.events.failed(op.ticket.ticket_id, error)
            if isinstance(op, Measure):
                op.done(error)

    def _hang_up(self) -> None:
        """Close the connection, which may take seconds: no ticket begins on this link in the meantime."""
        try:
            if self._reader is not None:
                self._reader.stop()
        except Exception as error:  # noqa: BLE001  a failed close must not keep the tickets open
            _log.error("kv_link_close_failed", error, peer=self._key.instance_id)

    def _make_hello(self) -> Hello:
        settings, layout = self._settings, self._settings.memory.layout
        return Hello(
            protocol_version=PROTOCOL_VERSION, sender_id=settings.instance_id, sender_epoch=settings.epoch,
            link_epoch=self.link_epoch, receiver_id=self._key.instance_id, receiver_epoch=self._key.epoch,
            transport="", block_size=layout.block_size, num_blocks=layout.num_blocks, tensors=layout.model_tensors,
            digests=settings.digests, sender_rank=layout.rank.number, sender_ranks=layout.rank.of,
            receiver_rank=self._key.rank.number, receiver_ranks=self._key.rank.of,
        )  # fmt: skip


def join_all(links: Iterable[Link], timeout_s: float) -> None:
    """Wait for the threads of all links together; cut the remaining links after 4/5 of the time."""
    links, started = list(links), time.monotonic()
    for until in (started + timeout_s * 4 / 5, started + timeout_s):
        for link in links:
            link.thread.join(max(0.0, until - time.monotonic()))
        links = [link for link in links if link.thread.is_alive()]
        for link in links:
            link.cut()
    for link in links:
        _log.warning("kv_thread_still_running", thread=link.thread.name)
