"""One accepted connection of the receiver: the handshake, then its messages in order, on its own thread."""

import contextlib
import threading
from collections.abc import Callable

from kvtransfer.digest import Region
from kvtransfer.handshake import answer
from kvtransfer.hello import Hello
from kvtransfer.link_codec import WireError, decode
from kvtransfer.link_messages import Frame, MessageType, Refuse, Signal
from kvtransfer.probe_receiver import ProbeReceiver
from kvtransfer.stream import LinkLost, Stream
from kvtransfer.ticket_table import TicketTable
from kvtransfer.transport_interface import Inlet, Timeouts, Transport
from kvtransfer.transport_table import TRAITS
from security.trust import Trust
from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger
from wire.errors import PdserveError

_log = EventLogger("kvtransfer")
_UNKNOWN = "an unknown peer"
_FROM_SENDER = (
    MessageType.OPEN, MessageType.FRAME, MessageType.COMMIT, MessageType.ABORT, MessageType.RENEW, MessageType.PING,
    MessageType.PROBE, MessageType.HELD,
)  # fmt: skip


class Incoming:
    """Owner of one accepted connection. When it ends, the tickets opened on it end too."""

    def __init__(
        self, number: int, stream: Stream, table: TicketTable, *, choose: Callable[[Hello], Transport],
        timeouts: Timeouts, trust: Trust, digests: bool, ended: Callable[[int], None], refusals: CappedLog,
        make_scratch: Callable[[int], Region],
    ) -> None:  # fmt: skip
        self._number, self._stream, self._table = number, stream, table
        self._choose, self._timeouts, self._digests, self._ended = choose, timeouts, digests, ended
        self._trust, self._refusals = trust, refusals
        self._inlet: Inlet | None = None
        self._probes = ProbeReceiver(stream, make_scratch)
        self.thread = threading.Thread(target=self._run, name=f"kv-in-{number}", daemon=True)

    def answer(self, data: bytes) -> None:
        """Send a message to the sender without blocking. Any thread."""
        self._stream.send_now(data)

    def shutdown(self) -> None:
        """Make the thread end soon. Any thread."""
        self._stream.shutdown()

    def _run(self) -> None:
        sender, reason, greeted = _UNKNOWN, "the receiver failed", False
        try:
            self._inlet, hello = answer(
                self._stream, self._timeouts, self._choose, self._trust, digests=self._digests, refusals=self._refusals
            )
            sender, greeted = hello.sender_id, True
            reads_pool = TRAITS[hello.transport].reads_pool
            self._table.add_link(
                self._number, hello.source, receipts=reads_pool and not hello.digests,
                received=None if reads_pool else lambda: self._stream.bytes_received,
            )  # fmt: skip
            _log.info("kv_link_accepted", sender=sender, transport=hello.transport, link_epoch=hello.link_epoch)
            self._serve(self._inlet)
        except WireError as error:
            greeted = False
            reason = f"the link from {sender} was cut: {error}"
        except (LinkLost, PdserveError) as error:
            reason = f"the link from {sender} ended: {error}"
        except Exception as error:  # noqa: BLE001  the outermost frame of this connection's thread
            _log.error("kv_link_failed", error, sender=sender)
        finally:
            self._table.count(refused_connections=0 if greeted else 1)
            self._log_end(sender, reason)
            self._clean_up(sender, reason)

    def _log_end(self, sender: str, reason: str) -> None:
        if sender is _UNKNOWN:
            self._refusals.info("kv_link_closed", "kv_link_closed", sender=sender, reason=reason)
        else:
            _log.info("kv_link_closed", sender=sender, reason=reason)

    def _clean_up(self, sender: str, reason: str) -> None:
        """Release everything: an error at one step must not skip the others."""
        try:
            with contextlib.ExitStack() as steps:  # run in reverse order
                steps.callback(self._ended, self._number)
                steps.callback(self._stream.close)
                if self._inlet is not None:
                    steps.callback(self._inlet.close)
                steps.callback(self._table.lost, self._number, reason)
                steps.callback(self._stream.shutdown)
        except Exception as error:  # noqa: BLE001  the outermost frame of this connection's thread
            _log.error("kv_link_clean_up_failed", error, sender=sender)

    def _serve(self, inlet: Inlet) -> None:
        while True:
            kind, body = self._stream.receive_message()
            if kind not in _FROM_SENDER:
                raise WireError(f"{kind.name} is not a message that a sender sends")
            message = decode(kind, body)
            assert not isinstance(message, Refuse)
            if isinstance(message, Frame) and message.num_bytes == 0:
                raise WireError("an empty FRAME")
            if isinstance(message, Signal):
                self._probes.handle(message)
            elif self._probes.is_probe_frame(message):
                with self._table.arriving(self._number):
                    self._probes.move(message, inlet)
            else:
                self._table.handle(self._number, message, inlet)
