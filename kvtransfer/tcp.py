"""TCP transport: the payload follows its header and is received directly into the slots, after the header's check."""

import contextlib
import mmap
import socket
from dataclasses import replace

from kvtransfer.device_memory import DeviceRegion
from kvtransfer.digest import RegionRuns, StopFlag
from kvtransfer.hello import Hello
from kvtransfer.interface import PoolMemory
from kvtransfer.link_codec import FRAME_HEAD_BYTES, MAX_FRAME_BYTES, WireError, encode
from kvtransfer.link_messages import Frame, Taken
from kvtransfer.mover import process_mover
from kvtransfer.staging import Staging, pieces_of
from kvtransfer.stream import Stream
from kvtransfer.transport_interface import FRAME_BYTES, Timeouts, TransportTraits
from wire.errors import ConfigError, HandoffFailed
from wire.types import KvEndpoint

_SMALL_ROW_BYTES = 32 << 10
_RING_BYTES = 4 * FRAME_BYTES


class TcpTransport:
    """Implements transport.Transport over TCP."""

    traits = TransportTraits("tcp", max_links=16, through_host=lambda _: True)

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory
        self._source: str | None = None

    def unusable(self) -> str | None:
        """It works everywhere."""
        return None

    def bind(self, host: str | None, source: str | None) -> None:
        """Use `source` as the address of outgoing connections."""
        self._source = source

    def unreachable(self, endpoint: KvEndpoint) -> str | None:
        """Any address may be tried."""
        return None

    def connect(self, endpoint: KvEndpoint, timeouts: Timeouts) -> Stream:
        """Connect to "host:port"."""
        return connect(endpoint.address, timeouts, self._source)

    def outlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> "TcpOutlet":
        """Do nothing: there is nothing to set up."""
        return TcpOutlet()

    def inlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> "TcpInlet":
        """Read ahead no further than a frame's header: payload is received directly in its place."""
        stream.read_ahead(FRAME_HEAD_BYTES)
        return TcpInlet(stream, digests=hello.digests)


class TcpOutlet:
    """The sender's side of one connection."""

    max_frame_bytes = FRAME_BYTES

    def __init__(self) -> None:
        self._ring: Staging | None = None
        self._at = 0

    def announce(self, frame: Frame, source: RegionRuns) -> list[memoryview | bytes]:
        """Return the header, then the payload: in place, or gathered if it is many small rows."""
        header = encode(replace(frame, block_ids=()))
        if not _is_scattered(source) or frame.num_bytes > FRAME_BYTES:
            return [header, *pieces_of(source)]
        return [header, self._gather(source, frame.num_bytes)]

    def _gather(self, source: RegionRuns, num_bytes: int) -> memoryview:
        """Copy to the ring, which is far larger than what an Outbox holds back: unsent data is never overwritten."""
        if self._ring is None:
            self._ring = Staging(memoryview(mmap.mmap(-1, _RING_BYTES)))
        if self._at + num_bytes > _RING_BYTES:
            self._at = 0
        start, self._at = self._at, self._at + num_bytes
        self._ring.gather(start, source)
        return self._ring.view[start : start + num_bytes]

    def taken(self, message: Taken) -> None:
        """Do nothing: the receiver does not use the sender's memory."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class TcpInlet:
    """The receiver's side of one connection."""

    def __init__(self, stream: Stream, *, digests: bool) -> None:
        self._stream, self._digests = stream, digests
        self._mover = process_mover()
        self._staging: Staging | None = None
        self._moved = 0

    def move(self, frame: Frame, target: RegionRuns, stop: StopFlag) -> int | None:
        """Receive into the slots and digest them there; small rows and device memory go through a buffer."""
        region, base, runs = target
        if runs.num_bytes != frame.num_bytes:
            raise HandoffFailed(
                f"frame {frame.number} has {frame.num_bytes} bytes, but its slots have {runs.num_bytes}"
            )
        if isinstance(region, DeviceRegion) or _is_scattered(target):
            digest = self._move_staged(frame, target, stop)
        elif self._receive(
            frame, [region.view[base + offset : base + offset + num_bytes] for offset, num_bytes in runs.rows()], stop
        ):
            digest = self._mover.digest(target) if self._digests else 0
        else:
            digest = None
        if digest is not None:
            self._moved = 0
        return digest

    def skip(self, frame: Frame) -> None:
        """Drain the rest through a small scratch buffer; a payload past the limit ends the connection."""
        if frame.num_bytes > MAX_FRAME_BYTES:
            raise WireError(f"a FRAME has {frame.num_bytes} bytes, but the limit is {MAX_FRAME_BYTES}")
        left, self._moved = frame.num_bytes - self._moved, 0
        self._stream.drain(left)

    def _move_staged(self, frame: Frame, target: RegionRuns, stop: StopFlag) -> int | None:
        if self._staging is None or len(self._staging.view) < frame.num_bytes:
            self._staging = Staging(memoryview(mmap.mmap(-1, max(FRAME_BYTES, frame.num_bytes))))
        staging = self._staging
        if not self._receive(frame, [staging.view[: frame.num_bytes]], stop):
            return None
        return staging.scatter(0, target, stop, digests=self._digests)

    def _receive(self, frame: Frame, pieces: list[memoryview], stop: StopFlag) -> bool:
        """Fill the pieces; return False if `stop` interrupted it: `skip` reads the rest."""
        self._moved = self._stream.receive_pieces(pieces, stopped=stop.is_set)
        return self._moved == frame.num_bytes

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def _is_scattered(place: RegionRuns) -> bool:
    """Return whether gathering pays: a piece costs the kernel as much as copying a few KiB."""
    return place.runs.num_rows > 1 and place.runs.num_bytes < _SMALL_ROW_BYTES * place.runs.num_rows


def connect(address: str, timeouts: Timeouts, source: str | None = None) -> Stream:
    """Connect to "host:port", from the address `source` if both have the same family. Raises OSError, ValueError."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    start = (source, 0) if source is not None and (":" in source) == (":" in host) else None
    sock = socket.create_connection((host, int(port)), timeout=timeouts.connect_s, source_address=start)
    tune(sock, timeouts.progress_s)
    return Stream(sock, progress_timeout_s=timeouts.progress_s)


def listen(host: str, port_range: tuple[int, int] | None) -> tuple[socket.socket, str]:
    """Listen on a free port of `host`, or on the first free one of the range (inclusive); return "host:port".

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
    """Send small messages at once, and detect a peer that vanished."""
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
