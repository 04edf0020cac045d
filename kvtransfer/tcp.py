"""TCP transport: the payload follows its header and is received straight into the slots, after the header's check."""

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvtransfer.digest import digest_of
from kvtransfer.frame import MAX_FRAME_BYTES, Frame, Taken, WireError, encode
from kvtransfer.hello import Hello
from kvtransfer.interface import PoolMemory
from kvtransfer.stream import Stream
from kvtransfer.transport import Timeouts
from wire.errors import ConfigError
from wire.types import KvEndpoint


class TcpTransport:
    """Implements transport.Transport over TCP alone."""

    name = "tcp"
    over_unix = False

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory

    def unusable(self) -> str | None:
        """It works everywhere."""
        return None

    def unreachable(self, endpoint: KvEndpoint) -> str | None:
        """Any address may be tried."""
        return None

    def connect(self, endpoint: KvEndpoint, timeouts: Timeouts) -> Stream:
        """Connect to "host:port"."""
        return connect(endpoint.address, timeouts)

    def outlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> "TcpOutlet":
        """Nothing to set up."""
        return TcpOutlet()

    def inlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> "TcpInlet":
        """Nothing to set up."""
        return TcpInlet(stream, digests=hello.digests)


class TcpOutlet:
    """The sender's side of one connection."""

    def announce(self, frame: Frame, pieces: Sequence[memoryview]) -> list[memoryview | bytes]:
        """The header, then the payload from where it lies."""
        return [encode(replace(frame, block_ids=())), *pieces]

    def taken(self, message: Taken) -> None:
        """Nothing is lent."""

    def close(self) -> None:
        """Nothing is held."""


class TcpInlet:
    """The receiver's side of one connection."""

    def __init__(self, stream: Stream, *, digests: bool) -> None:
        self._stream, self._digests = stream, digests
        self._moved = 0

    def move(self, frame: Frame, targets: Sequence[memoryview], stopped: Callable[[], bool]) -> int | None:
        """Receive into the targets, then digest what lies there."""
        self._moved = self._stream.receive_pieces(targets, stopped=stopped)
        if self._moved < frame.num_bytes:
            return None
        self._moved = 0
        return digest_of(targets) if self._digests else 0

    def skip(self, frame: Frame) -> None:
        """Drain the rest through a small scratch buffer; a payload past the limit ends the connection."""
        if frame.num_bytes > MAX_FRAME_BYTES:
            raise WireError(f"FRAME of {frame.num_bytes} bytes, the limit is {MAX_FRAME_BYTES}")
        left, self._moved = frame.num_bytes - self._moved, 0
        self._stream.drain(left)

    def close(self) -> None:
        """Nothing is held."""


def connect(address: str, timeouts: Timeouts) -> Stream:
    """Connect to "host:port". Raises OSError, ValueError."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout=timeouts.connect_s)
    tune(sock, timeouts.progress_s)
    return Stream(sock, progress_timeout_s=timeouts.progress_s)


def listen(host: str, port_range: tuple[int, int] | None) -> tuple[socket.socket, str]:
    """Listen on a free port of `host`, or on the first free one of the range (both ends in); return "host:port".

    Raises ConfigError.
    """
    first, last = port_range or (0, 0)
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    for port in range(first, last + 1):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(128)
        except OSError:
            sock.close()
            continue
        shown = f"[{host}]" if ":" in host else host
        return sock, f"{shown}:{sock.getsockname()[1]}"
    raise ConfigError(f"no port of {first}-{last} on {host} is free for KV")


def tune(sock: socket.socket, progress_timeout_s: float) -> None:
    """Send small messages at once, and find out about a peer that vanished without a word."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(progress_timeout_s * 1000)),
    ):
        with contextlib.suppress(AttributeError, OSError):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
