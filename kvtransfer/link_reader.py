"""A link's reading thread, and which of reader and writer closes their connection."""

import threading
import time
from collections.abc import Callable

from kvtransfer.link_codec import WireError, decode
from kvtransfer.link_messages import Abort, Ack, Nack, Read, Renew, Signal, Taken, TicketMessage
from kvtransfer.link_ops import LinkOver, MessageReceived, ProbeAnswered
from kvtransfer.stream import LinkLost, Stream
from kvtransfer.transport_interface import Outlet
from telemetry.logs import EventLogger
from wire.errors import InstanceLost, InternalError

_log = EventLogger("kvtransfer")
_JOIN_S = 2.0


class LinkReader:
    """Owner of the reading thread. Reader and writer share the connection: the last one to leave closes it.

    A descriptor closed while a thread still reads it may be reused for another socket. `note` receives each message
    about a ticket at once, `post` the messages that the writer handles in their order.
    """

    def __init__(
        self, stream: Stream, outlet: Outlet, peer_id: str, *,
        post: Callable[[MessageReceived | ProbeAnswered | LinkOver], None],
        note: Callable[[TicketMessage], None],
    ) -> None:  # fmt: skip
        self._stream, self._outlet, self._peer_id, self._post = stream, outlet, peer_id, post
        self._note = note
        self._num_users = 1
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"kv-back-{peer_id}", daemon=True)

    def start(self) -> None:
        """Start reading. Raises RuntimeError if no thread can be started."""
        with self._lock:
            self._thread.start()
            self._num_users += 1

    def stop(self) -> None:
        """The writer has finished: end the connection, release the outlet, and wait briefly for the reader to leave.

        The messages received until then have been posted, unless the reader is blocked.
        """
        self._stream.shutdown()
        self._outlet.close()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                _log.warning("kv_thread_still_running", thread=self._thread.name)
        self._release_user()

    def _run(self) -> None:
        try:
            while True:
                self._receive()
        except (LinkLost, WireError) as error:
            self._post(LinkOver(InstanceLost(f"the KV link to {self._peer_id} is lost: {error}")))
        except Exception as error:  # noqa: BLE001  the thread's outermost frame: without this thread the link must end
            _log.error("kv_link_failed", error, peer=self._peer_id)
            self._post(LinkOver(InternalError(f"the KV link to {self._peer_id} failed: {error}")))
        finally:
            self._release_user()

    def _receive(self) -> None:
        message = decode(*self._stream.receive_message())
        match message:
            case Taken():
                self._outlet.taken(message)
            case Renew():
                self._note(message)
            case Nack() | Read() | Ack() | Abort():
                self._note(message)
                self._post(MessageReceived(message))
            case Signal():
                self._post(ProbeAnswered(message, time.monotonic()))
            case _:
                raise WireError(f"{type(message).__name__} is not a message that a receiver sends")

    def _release_user(self) -> None:
        with self._lock:
            self._num_users -= 1
            last = self._num_users == 0
        if last:
            self._stream.close()
