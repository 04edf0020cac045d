"""The sender's link to one instance: one life of one connection, with its queue and its two threads.

callers --post--> queue --> writer thread: dials, digests, sends, keeps the leases; owns every ticket's state
                    ^------ reader thread: NACK, ACK, ABORT of the receiver, and the end of the connection
"""

import queue
import threading
from collections import deque
from collections.abc import Sequence

from kvtransfer.dial import dial
from kvtransfer.frame import Abort, Ack, Nack, Taken, WireError, decode
from kvtransfer.hello import Hello
from kvtransfer.link_ops import Begin, Heard, LinkSettings, Lost, Op, Tend
from kvtransfer.outbox import Outbox
from kvtransfer.sendings import Sendings
from kvtransfer.stream import LinkLost, Stream
from kvtransfer.transport import Outlet
from telemetry.logs import EventLogger
from wire.errors import InstanceLost, InternalError, PdserveError
from wire.types import PROTOCOL_VERSION, KvEndpoint, LinkStatus

_log = EventLogger("kvtransfer")
_GATHER_OPS = 64


class Link:
    """Owner of one connection's life on the sender. Its end ends every ticket begun on it."""

    def __init__(
        self, settings: LinkSettings, peer_id: str, peer_epoch: int, link_epoch: int,
        endpoints: Sequence[KvEndpoint], *, bytes_sent: int = 0, failures: int = 0,
    ) -> None:  # fmt: skip
        self._settings, self._peer_id, self._peer_epoch, self._link_epoch = settings, peer_id, peer_epoch, link_epoch
        self._endpoints, self._bytes_before, self._failures = endpoints, bytes_sent, failures
        self._state, self._transport = "connecting", ""
        self._passed_over: tuple[str, ...] = ()
        self._queue: queue.SimpleQueue[Op] = queue.SimpleQueue()
        self._gathered: deque[Op] = deque()  # taken from the queue and not yet handled
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._sendings: Sendings | None = None
        self.thread = threading.Thread(target=self._run, name=f"kv-out-{peer_id}", daemon=True)

    def begin(self, op: Begin) -> bool:
        """Queue a Begin; False when this life is over and the caller needs a new link."""
        with self._lock:
            if self._state == "down":
                return False
            self._queue.put(op)
            return True

    def post(self, op: Op) -> None:
        """Queue an op, never waiting. After the link's end it is lost, as its tickets are."""
        self._queue.put(op)

    def status(self) -> LinkStatus:
        """The link as it is now."""
        return LinkStatus(
            self._peer_id, self._transport, self._state, self._link_epoch, self.bytes_sent, self._failures,
            passed_over=self._passed_over,
        )  # fmt: skip

    @property
    def bytes_sent(self) -> int:
        """KV bytes announced to this instance, by earlier lives too."""
        return self._bytes_before + (self._sendings.bytes_sent if self._sendings is not None else 0)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread; a peer that holds it up is cut half-way."""
        self.thread.join(timeout_s / 2)
        stream = self._stream
        if stream is not None:
            stream.shutdown()
        self.thread.join(timeout_s / 2)
        if self.thread.is_alive():
            _log.warning("kv_thread_left", thread=self.thread.name)

    def _run(self) -> None:
        error: PdserveError | None
        try:
            error = self._live()
        except PdserveError as reason:
            error = reason
        except LinkLost as reason:
            error = InstanceLost(f"the KV link to {self._peer_id} is lost: {reason}")
        except Exception as reason:  # noqa: BLE001  the outermost frame of this link's thread
            _log.error("kv_link_failed", exc=reason, peer=self._peer_id)
            error = InternalError(f"the KV link to {self._peer_id} failed: {reason}")
        self._wind_up(error)

    def _live(self) -> PdserveError | None:
        settings = self._settings
        dialled = dial(settings.transports, self._endpoints, self._hello(), settings.timeouts, settings.trust)
        stream, outlet, outbox = dialled.stream, dialled.outlet, Outbox(dialled.stream)
        reader = threading.Thread(
            target=self._read, args=(stream, outlet), name=f"kv-back-{self._peer_id}", daemon=True
        )
        self._stream, self._sendings = stream, Sendings(settings, outbox, outlet, dialled.transport, dialled.digests)
        self._transport, self._passed_over, self._state = dialled.transport, dialled.passed_over, "up"
        _log.info("kv_link_up", peer=self._peer_id, transport=self._transport, link_epoch=self._link_epoch)
        reader.start()
        try:
            return self._serve(self._sendings, outbox)
        finally:
            stream.shutdown()
            outlet.close()
            reader.join(settings.timeouts.progress_s)
            stream.close()

    def _serve(self, sendings: Sendings, outbox: Outbox) -> PdserveError | None:
        while True:
            self._gather()
            while self._gathered:
                op = self._gathered.popleft()
                if isinstance(op, Lost):
                    if op.error is None:
                        sendings.abort_all("the sender is shutting down")
                        outbox.flush()
                    return op.error
                if not isinstance(op, Tend):
                    sendings.handle(op)
            sendings.tend()
            outbox.flush()

    def _gather(self) -> None:
        try:
            self._gathered.append(self._queue.get(timeout=self._settings.tend_interval_s))
            while len(self._gathered) < _GATHER_OPS:
                self._gathered.append(self._queue.get_nowait())
        except queue.Empty:
            pass

    def _read(self, stream: Stream, outlet: Outlet) -> None:
        try:
            while True:
                message = decode(*stream.receive_message())
                if isinstance(message, Taken):
                    outlet.taken(message)
                    continue
                if not isinstance(message, Nack | Ack | Abort):
                    raise WireError(f"{type(message).__name__} came from a receiver")
                self._queue.put(Heard(message))
        except (LinkLost, WireError) as error:
            self._queue.put(Lost(InstanceLost(f"the KV link to {self._peer_id} is lost: {error}")))
        except Exception as error:  # noqa: BLE001  the outermost frame of this thread: a link that is deaf must end
            _log.error("kv_link_failed", exc=error, peer=self._peer_id)
            self._queue.put(Lost(InternalError(f"the KV link to {self._peer_id} failed: {error}")))

    def _wind_up(self, error: PdserveError | None) -> None:
        with self._lock:
            self._state = "down"
        if error is not None:
            self._failures += 1
            _log.warning("kv_link_down", peer=self._peer_id, transport=self._transport, reason=error)
        error = error or InstanceLost(f"the KV link to {self._peer_id} was closed")
        ops = [*self._gathered, *(self._queue.get_nowait() for _ in range(self._queue.qsize()))]
        if self._sendings is not None:
            self._sendings.fail_all(error, [op for op in ops if isinstance(op, Heard)])
        for op in ops:
            if isinstance(op, Begin) and self._settings.claim(op.ticket.ticket_id):
                self._settings.events.failed(op.ticket.ticket_id, error)

    def _hello(self) -> Hello:
        settings, layout = self._settings, self._settings.memory.layout
        return Hello(
            protocol_version=PROTOCOL_VERSION, sender_id=settings.instance_id, sender_epoch=settings.epoch,
            link_epoch=self._link_epoch, receiver_id=self._peer_id, receiver_epoch=self._peer_epoch, transport="",
            block_size=layout.block_size, num_blocks=layout.num_blocks, tensors=layout.tensors,
            digests=settings.digests,
        )  # fmt: skip
