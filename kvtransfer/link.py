"""The sender's link to one instance: one life of one connection, with its queue and its two threads.

callers --post--> queue --> writer thread: dials, digests, sends, keeps the leases; owns every ticket's state
                    ^------ reader thread: NACK, READ, ACK, ABORT of the receiver, and the end of the connection
                            RENEW of the receiver counts at once

    connecting -> up -> draining -> down      draining: takes no new ticket and closes when its last one has ended
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvtransfer.dial import Dialled, dial
from kvtransfer.frame import TicketMessage
from kvtransfer.hello import Hello
from kvtransfer.link_ops import (
    Begin,
    LinkOver,
    LinkSettings,
    Measure,
    MessageReceived,
    Op,
    PeerKey,
    ProbeAnswered,
    Put,
    Tend,
    merge_puts,
)
from kvtransfer.link_reader import LinkReader
from kvtransfer.outbox import Outbox
from kvtransfer.outgoing_tickets import OutgoingTickets
from kvtransfer.probe import SpeedProbe
from kvtransfer.stream import LinkLost, Stream
from kvtransfer.transport import Transport
from telemetry.logs import EventLogger
from wire.errors import InstanceLost, InternalError, PdserveError
from wire.types import PROTOCOL_VERSION, KvEndpoint

_log = EventLogger("kvtransfer")
_LEAST_GATHERED, _MOST_GATHERED = 4, 512


class LinkOwner(Protocol):
    """Who hears of a link's life, on the link's own thread; none of the link's locks is held."""

    def dial_failed(self, transport: str, reason: str) -> None:
        """One transport was tried and did not work."""
        ...

    def up(self, link: "Link") -> None:
        """It takes frames."""
        ...

    def down(self, link: "Link", error: PdserveError | None) -> None:
        """It is over, its tickets are about to end; `error` is None when this side closed it in peace."""
        ...

    def tick(self) -> None:
        """The link lives; called all the time."""
        ...


class Link:
    """Owner of one connection's life on the sender. Its end ends every ticket begun on it.

    It dials `transports` in their order. A `spare` one was made without a ticket.
    """

    def __init__(
        self, settings: LinkSettings, key: PeerKey, link_epoch: int, endpoints: Sequence[KvEndpoint],
        transports: Sequence[Transport], owner: LinkOwner, *, spare: bool = False,
    ) -> None:  # fmt: skip
        self.link_epoch, self.transports, self.spare = link_epoch, tuple(transports), spare
        self.transport = ""  # the one in use, known a moment before "up"
        self._settings, self._key, self._endpoints, self._owner = settings, key, endpoints, owner
        self._phase, self._draining = "connecting", False
        self._closing = False
        self._promised: dict[str, int] = {}
        self._load = 0
        self._queue: queue.SimpleQueue[Op] = queue.SimpleQueue()
        self._gathered: deque[Op] = deque()  # taken from the queue and not yet handled
        self._gather_ops = _LEAST_GATHERED
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._reader: LinkReader | None = None
        self._sendings: OutgoingTickets | None = None
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
        """KV bytes of the tickets that were begun here and have not ended."""
        return self._load

    @property
    def bytes_sent(self) -> int:
        """KV bytes announced."""
        return 0 if self._sendings is None else self._sendings.bytes_sent

    @property
    def frames_resent(self) -> int:
        """Frames that went out a second time."""
        return 0 if self._sendings is None else self._sendings.frames_resent

    def begin(self, op: Begin, num_bytes: int) -> bool:
        """Queue a ticket of `num_bytes`; False when this life is over and the caller needs another link."""
        with self._lock:
            if self._phase == "down" or self._draining:
                return False
            self._promised[op.ticket.ticket_id] = num_bytes
            self._load += num_bytes
            self._queue.put(op)
            return True

    def measure(self, op: Measure) -> bool:
        """Queue a measurement; False when the caller needs another link."""
        with self._lock:
            if self._phase == "down" or self._draining:
                return False
            self._queue.put(op)
            return True

    def ended(self, ticket_id: str) -> None:
        """A ticket has ended: it is no load any more."""
        with self._lock:
            self._load -= self._promised.pop(ticket_id, 0)

    def announced(self, ticket_id: str) -> int:
        """KV bytes of a ticket that have gone out so far."""
        return 0 if self._sendings is None else self._sendings.announced(ticket_id)

    def post(self, op: Op) -> None:
        """Queue an op, never waiting. After the link's end it is lost, as its tickets are."""
        self._queue.put(op)

    def drain(self) -> None:
        """Take no new ticket, and close in peace when the last one has ended."""
        with self._lock:
            self._draining = True
        self.post(Tend())

    def end(self) -> None:
        """Close it in peace: the receiver is told of each ticket, which may take a dial to its end."""
        self.post(LinkOver(None))
        if self._phase == "connecting" and self.spare:
            self.cut()

    def cut(self) -> None:
        """Close it at once: wake whoever waits on the connection."""
        self._closing = True
        stream = self._stream
        if stream is not None:
            stream.shutdown()

    def check_open(self) -> None:
        """Stop a dial that nobody wants any more (dial.Watch)."""
        if self._closing:
            raise InstanceLost(f"the KV link to {self._key.instance_id} was closed")

    def connected(self, stream: Stream) -> None:
        """The dial got this far (dial.Watch)."""
        self._stream = stream

    def failed(self, transport: str, reason: str) -> None:
        """The dial goes on with the next transport (dial.Watch)."""
        self._owner.dial_failed(transport, reason)

    def _run(self) -> None:
        error: PdserveError | None
        try:
            error = self._live()
        except PdserveError as reason:
            error = reason
        except LinkLost as reason:
            error = InstanceLost(f"the KV link to {self._key.instance_id} is lost: {reason}")
        except Exception as reason:  # noqa: BLE001  the outermost frame of this link's thread
            _log.error("kv_link_failed", exc=reason, peer=self._key.instance_id)
            error = InternalError(f"the KV link to {self._key.instance_id} failed: {reason}")
        self._wind_up(None if self._closing else error)

    def _live(self) -> PdserveError | None:
        dialled = dial(
            self.transports, self._endpoints, self._hello(), self._settings.timeouts, self._settings.trust, self
        )
        self._reader = LinkReader(
            dialled.stream, dialled.outlet, self._key.instance_id, post=self._queue.put, note=self._note,
            clock=self._settings.clock,
        )  # fmt: skip
        self._reader.start()
        self.check_open()
        return self._serve(*self._open(dialled))

    def _note(self, message: TicketMessage) -> None:
        if self._sendings is not None:
            self._sendings.note(message)

    def _open(self, dialled: Dialled) -> tuple[OutgoingTickets, SpeedProbe, Outbox]:
        settings, outbox, digests = self._settings, Outbox(dialled.stream), dialled.digests
        sendings = OutgoingTickets(settings, outbox, dialled.outlet, dialled.transport, digests, self._key.rank)
        probe = SpeedProbe(settings, outbox, dialled.outlet, self._key.epoch, digests=digests)
        self._sendings, self._probe, self.transport = sendings, probe, dialled.transport
        with self._lock:
            self._phase = "up"
        _log.info("kv_link_up", peer=self._key.instance_id, transport=self.transport, link_epoch=self.link_epoch)
        self._owner.up(self)
        return sendings, probe, outbox

    def _serve(self, sendings: OutgoingTickets, probe: SpeedProbe, outbox: Outbox) -> PdserveError | None:
        while True:
            self._gather()
            while self._gathered:
                op = self._gathered.popleft()
                match op:
                    case LinkOver(error):
                        if error is None:
                            sendings.abort_all("the sender is shutting down")
                            outbox.flush()
                        return error
                    case Measure():
                        probe.start(op)
                    case ProbeAnswered():
                        probe.heard(op)
                    case Tend():
                        pass
                    case Put():
                        sendings.handle(op, behind=any(isinstance(one, Put) for one in self._gathered))
                    case _:
                        sendings.handle(op)
            sendings.tend()
            probe.tend()
            outbox.flush()
            if self._draining and self._queue.empty() and sendings.idle and probe.idle:
                return None
            self._owner.tick()

    def _gather(self) -> None:
        """Take what waits; few ops at first, so that the receiver has work while many are joined."""
        try:
            self._gathered.append(self._queue.get(timeout=self._settings.tend_interval_s))
            while len(self._gathered) < self._gather_ops:
                self._gathered.append(self._queue.get_nowait())
            self._gather_ops = min(4 * self._gather_ops, _MOST_GATHERED)
        except queue.Empty:
            self._gather_ops = _LEAST_GATHERED
        self._gathered = deque(merge_puts(self._gathered))

    def _wind_up(self, error: PdserveError | None) -> None:
        with self._lock:
            self._phase = "down"
        if error is not None:
            _log.warning("kv_link_down", peer=self._key.instance_id, transport=self.transport, reason=error)
        self._owner.down(self, error)  # first: whoever hears that a ticket failed may begin the next one at once
        self._hang_up()
        error = error or InstanceLost(f"the KV link to {self._key.instance_id} was closed")
        ops = [*self._gathered, *(self._queue.get_nowait() for _ in range(self._queue.qsize()))]
        if self._sendings is not None:
            self._sendings.fail_all(error, [op for op in ops if isinstance(op, MessageReceived)])
        if self._probe is not None:
            self._probe.fail(error)
        for op in ops:
            if isinstance(op, Begin) and self._settings.claim(op.ticket.ticket_id):
                self._settings.events.failed(op.ticket.ticket_id, error)
            if isinstance(op, Measure):
                op.done(error)

    def _hang_up(self) -> None:
        """End the connection, which may take seconds: no ticket is begun here any more meanwhile."""
        try:
            if self._reader is not None:
                self._reader.stop()
        except Exception as error:  # noqa: BLE001  what cannot be closed must not keep the tickets from ending
            _log.error("kv_link_failed", exc=error, peer=self._key.instance_id)

    def _hello(self) -> Hello:
        settings, layout = self._settings, self._settings.memory.layout
        return Hello(
            protocol_version=PROTOCOL_VERSION, sender_id=settings.instance_id, sender_epoch=settings.epoch,
            link_epoch=self.link_epoch, receiver_id=self._key.instance_id, receiver_epoch=self._key.epoch,
            transport="", block_size=layout.block_size, num_blocks=layout.num_blocks, tensors=layout.model_tensors,
            digests=settings.digests, sender_rank=layout.rank.number, sender_ranks=layout.rank.of,
            receiver_rank=self._key.rank.number, receiver_ranks=self._key.rank.of,
        )  # fmt: skip


def join_all(links: Iterable[Link], timeout_s: float) -> None:
    """Wait for the threads of all links together; what holds one up is cut towards the end."""
    links, started = list(links), time.monotonic()
    for until in (started + timeout_s * 4 / 5, started + timeout_s):
        for link in links:
            link.thread.join(max(0.0, until - time.monotonic()))
        links = [link for link in links if link.thread.is_alive()]
        for link in links:
            link.cut()
    for link in links:
        _log.warning("kv_thread_left", thread=link.thread.name)
