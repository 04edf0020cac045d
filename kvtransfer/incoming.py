"""One accepted connection of the receiver: the handshake, then messages one after another on its own thread."""

import threading
from collections.abc import Callable

from kvtransfer.frame import (
    Frame,
    MessageType,
    Refuse,
    VersionMismatch,
    WireError,
    decode,
    encode,
)
from kvtransfer.hello import Hello, Welcome, check_hello, decode_hello, encode_welcome
from kvtransfer.stream import LinkLost, Stream, expect
from kvtransfer.ticket_table import TicketTable
from kvtransfer.transport import Inlet
from telemetry.logs import EventLogger
from wire.errors import Incompatible, PdserveError, to_name
from wire.kv_layout import PoolLayout

_log = EventLogger("kvtransfer")
_FROM_SENDER = (MessageType.OPEN, MessageType.FRAME, MessageType.COMMIT, MessageType.ABORT, MessageType.RENEW)


class Incoming:
    """Owner of one accepted connection. Its end ends the tickets that were opened on it."""

    def __init__(
        self, number: int, transport: str, stream: Stream, inlet: Inlet, table: TicketTable, *,
        instance_id: str, epoch: int, layout: PoolLayout, hello_timeout_s: float, ended: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._number, self._transport, self._stream, self._inlet, self._table = number, transport, stream, inlet, table
        self._instance_id, self._epoch, self._layout = instance_id, epoch, layout
        self._hello_timeout_s, self._ended = hello_timeout_s, ended
        self.thread = threading.Thread(target=self._run, name=f"kv-in-{number}", daemon=True)

    def answer(self, data: bytes) -> None:
        """Send a message to the sender without waiting; from any thread."""
        self._stream.send_now(data)

    def shutdown(self) -> None:
        """Make the thread end soon; from any thread."""
        self._stream.shutdown()

    def _run(self) -> None:
        sender, reason, greeted = "a stranger", "the receiver failed", False
        try:
            hello = self._handshake()
            sender, greeted = hello.sender_id, True
            _log.info("kv_link_in", sender=sender, transport=self._transport, link_epoch=hello.link_epoch)
            self._serve()
        except WireError as error:
            greeted = False
            reason = f"the link from {sender} was cut: {error}"
        except (LinkLost, PdserveError) as error:
            reason = f"the link from {sender} ended: {error}"
        except Exception as error:  # noqa: BLE001  the outermost frame of this connection's thread
            _log.error("kv_link_failed", exc=error, sender=sender)
        finally:
            self._table.count(refused_connections=0 if greeted else 1)
            _log.info("kv_link_in_over", sender=sender, transport=self._transport, reason=reason)
            self._stream.shutdown()
            self._table.lost(self._number, reason)
            self._inlet.close()
            self._stream.close()
            self._ended(self._number)

    def _handshake(self) -> Hello:
        self._inlet.greet()
        try:
            hello = decode_hello(expect(self._stream, MessageType.HELLO, timeout_s=self._hello_timeout_s))
            check_hello(hello, instance_id=self._instance_id, epoch=self._epoch, layout=self._layout)
            self._inlet.admit(hello)
        except VersionMismatch as error:
            self._refuse(Incompatible(str(error)))
            raise
        except PdserveError as error:
            self._refuse(error)
            raise
        self._stream.send([encode_welcome(Welcome(self._epoch, hello.link_epoch))])
        return hello

    def _refuse(self, error: PdserveError) -> None:
        _log.warning("kv_link_refused", error=to_name(error), reason=error)
        self._stream.send([encode(Refuse(to_name(error), str(error)))])

    def _serve(self) -> None:
        while True:
            kind, body = self._stream.receive_message()
            if kind not in _FROM_SENDER:
                raise WireError(f"{kind.name} came from a sender")
            message = decode(kind, body)
            assert not isinstance(message, Refuse)
            if isinstance(message, Frame) and message.num_bytes == 0:
                raise WireError("an empty FRAME")
            self._table.handle(self._number, message, self._inlet)
