"""A TCP proxy between a KV sender and a KV receiver that parses messages and applies a test's faults to them.

sender ==> pump: read a message, `fault(message)` -> pieces ==> receiver
sender <== pump: `back(bytes)`, as they come                    <== receiver
"""

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from kvtransfer.link_codec import PREFIX, WireError, decode, decode_prefix
from kvtransfer.link_messages import Frame, MessageType

DEADLINE_S = 300.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close sends RST


@dataclass(frozen=True)
class Message:
    """One message of the sender: prefix and body, then a FRAME's payload. `number` counts its kind, from 0."""

    kind: MessageType
    number: int
    head: bytes
    payload: bytes = b""

    @property
    def frame(self) -> Frame:
        """The FRAME it is."""
        message = decode(self.kind, self.head[PREFIX.size :])
        assert isinstance(message, Frame)
        return message

    @property
    def data(self) -> bytes:
        """All of it, as received."""
        return self.head + self.payload

    def flipped(self, bit: int) -> "Message":
        """The same with one bit flipped; bits count from the head's first byte through the payload."""
        data = bytearray(self.data)
        data[bit // 8] ^= 1 << bit % 8
        return replace(self, head=bytes(data[: len(self.head)]), payload=bytes(data[len(self.head) :]))


class Cut(Exception):
    """A fault ends the connection here: `how` is close (both ways), half (to the receiver only) or reset."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


Fault = Callable[[Message], Iterable[bytes]]
"""Given each message of the sender in turn, yields what is passed to the receiver; may raise Cut, wait, or keep it."""


def faithful(message: Message) -> Iterable[bytes]:
    """Pass the message on."""
    yield message.data


@dataclass
class FaultProxy:
    """Owns the listener, its connections and their threads. `fault` and `back` may be changed between messages."""

    target: str
    fault: Fault = faithful
    back: Callable[[bytes], bytes] = bytes
    bytes_per_s: float | None = None
    recorded: list[Message] = field(default_factory=list)
    num_connections: int = 0

    def __post_init__(self) -> None:
        """Listen."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        """Where the sender is to connect."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            host, _, port = self.target.rpartition(":")
            far = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
            far.settimeout(None)
            self._open += (near, far)
            thread = threading.Thread(target=self._forward, args=(near, far), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        counts: dict[MessageType, int] = {}
        ended, how = threading.Event(), "close"
        back = threading.Thread(target=self._back, args=(far, near, ended), daemon=True)
        back.start()
        with contextlib.suppress(OSError, EOFError, WireError):  # anybody may connect here, as to any port
            try:
                while True:
                    message = _read_message(near, counts)
                    self.recorded.append(message)
                    self.num_connections += message.kind is MessageType.HELLO
                    for data in self.fault(message):
                        self._send(far, data)
            except Cut as cut:
                how = cut.how
        if how == "half":
            with contextlib.suppress(OSError):
                far.shutdown(socket.SHUT_WR)
        else:
            ended.set()
        back.join(DEADLINE_S)
        for sock in (near, far):
            if how == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sock.close()

    def _back(self, far: socket.socket, near: socket.socket, ended: threading.Event) -> None:
        """Forward the receiver's answers to the sender until the last one or `ended`; then close towards it."""
        readable = select.poll()
        readable.register(far, select.POLLIN)
        with contextlib.suppress(OSError):
            while not ended.is_set():
                if readable.poll(20):
                    data = far.recv(1 << 16)
                    if not data:
                        break
                    near.sendall(self.back(data))
        if not ended.is_set():
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)

    def _send(self, far: socket.socket, data: bytes) -> None:
        if self.bytes_per_s is None:
            far.sendall(data)
            return
        for at in range(0, len(data), 256):
            far.sendall(data[at : at + 256])
            if self._stopping.wait(256 / self.bytes_per_s):
                return


def replay(target: str, data: Iterable[bytes]) -> bytes:
    """Send the recording to the receiver once more, on its own connection; return what it answered."""
    host, _, port = target.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as sock:
        answer = bytearray()
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"".join(data))
            sock.shutdown(socket.SHUT_WR)
            while more := sock.recv(1 << 16):
                answer += more
        return bytes(answer)


def _read_message(sock: socket.socket, counts: dict[MessageType, int]) -> Message:
    prefix = _read(sock, PREFIX.size)
    kind, length = decode_prefix(prefix)
    message = Message(kind, counts.get(kind, 0), prefix + _read(sock, length))
    counts[kind] = message.number + 1
    if kind is MessageType.FRAME:
        message = replace(message, payload=_read(sock, message.frame.num_bytes))
    return message


def _read(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)
