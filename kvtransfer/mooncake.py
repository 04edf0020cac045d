"""Mooncake's transfer engine as a transport: the receiver reads the sender's staging memory, one-sided.

    sender    gathers a frame into its ring, FRAME has the position      TAKEN frees the space
    receiver  reads it into its own staging memory, digests it while copying into the slots

The engine (mooncake_engine.py) can also write to registered memory, and it listens on all interfaces: so only staging
memory is ever registered, never a pool; it is used only if `--kv-transport` names it, and it is started by the first
proven link, not before (docs/ports.md).
The same class of the package transfers host memory over TCP or RDMA, and device staging memory over HCCS or RoCE on
Ascend, depending on a trait of the pool's device. We have never run it over RDMA or on Ascend.
"""

import struct
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace

from kvtransfer.digest import RegionRuns, StopFlag
from kvtransfer.hello import Hello
from kvtransfer.interface import PoolMemory
from kvtransfer.link_codec import WireError, encode, pack
from kvtransfer.link_messages import Frame, MessageType, Taken
from kvtransfer.mooncake_engine import Registered, engine_at, lacking, read_method_of, warn_about_ports
from kvtransfer.process_group.devices import device_of
from kvtransfer.ring import Ring
from kvtransfer.stream import READ_AHEAD_BYTES, LinkLost, Stream, expect
from kvtransfer.tcp import connect
from kvtransfer.transport_interface import FRAME_BYTES, Timeouts, TransportTraits
from native.ticker import run_time
from wire.errors import HandoffFailed, Unavailable
from wire.types import KvEndpoint

_RING_BYTES = 16 << 20
_MAX_BYTES = FRAME_BYTES
_ROOM = struct.Struct("!QQ")
_MAX_SESSION_BYTES = 256
_POLL_S = 0.05
_GRACE_S = 1.0


class MooncakeTransport:
    """Implements transport.Transport. All links of this process at one address share one engine."""

    traits = TransportTraits(
        "mooncake", by_default=lambda _: False,
        through_host=lambda device: read_method_of(device).on_host, same="one_sided", measured_first=True,
    )  # fmt: skip

    def __init__(self, memory: PoolMemory) -> None:
        self._memory, self._device = memory, device_of(memory)
        self._source: str | None = None

    def unusable(self) -> str | None:
        """It needs the package, which needs Debian's libibverbs1."""
        return lacking(read_method_of(self._device).package)

    def bind(self, host: str | None, source: str | None) -> None:
        """Use `source` for connections; warn, once per process, of the ports that the first proven link will open."""
        self._source = source
        if host is not None:
            warn_about_ports(host)

    def unreachable(self, endpoint: KvEndpoint) -> str | None:
        """Any address may be tried."""
        return None

    def connect(self, endpoint: KvEndpoint, timeouts: Timeouts) -> Stream:
        """Connect to the instance's TCP listener."""
        return connect(endpoint.address, timeouts, self._source)

    def outlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> "MooncakeOutlet":
        """Register the ring and send its address to the receiver; the first link starts the engine. Raises OSError."""
        engine = engine_at(stream.socket.getsockname()[0], self._device)
        memory = Registered(engine, _RING_BYTES)
        body = _ROOM.pack(memory.staging.address, _RING_BYTES) + f"{engine.protocol} {engine.session}".encode()
        try:
            stream.send([pack(MessageType.SETUP, body)])
        except BaseException:
            memory.close()
            raise
        return MooncakeOutlet(memory, timeouts)

    def inlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> "MooncakeInlet":
        """Receive the address of the sender's ring; register this side's staging memory. Raises Unavailable, WireError.

        The first link starts the engine.
        """
        body = expect(stream, MessageType.SETUP, timeout_s=timeouts.progress_s)
        if not _ROOM.size < len(body) <= _ROOM.size + _MAX_SESSION_BYTES:
            raise WireError(f"SETUP of {len(body)} bytes does not describe a mooncake ring")
        try:
            address, num_bytes = _ROOM.unpack_from(body)
            protocol, session = bytes(body[_ROOM.size :]).decode("ascii").split(" ")
        except ValueError as error:
            raise WireError(f"malformed SETUP of {len(body)} bytes: {error}") from error
        method = read_method_of(self._device)
        if protocol != method.protocol:
            raise Unavailable(f"mooncake uses {method.protocol} on {self._device}, but the sender uses {protocol}")
        if session.rpartition(":")[0] != stream.socket.getpeername()[0]:
            raise WireError(f"the ring's session is {session!r}, which is not the address of the link's sender")
        try:
            memory = Registered(engine_at(stream.socket.getsockname()[0], self._device), _MAX_BYTES)
        except OSError as error:
            raise Unavailable(f"mooncake cannot serve {hello.sender_id}: {error}") from error
        stream.read_ahead(READ_AHEAD_BYTES)
        return MooncakeInlet(stream, memory, session, address, num_bytes, timeouts, digests=hello.digests)


class MooncakeOutlet:
    """The sender's side of one connection: owner of the ring that holds frames until they are taken."""

    max_frame_bytes = FRAME_BYTES

    def __init__(self, memory: Registered, timeouts: Timeouts) -> None:
        self._memory, self._timeouts = memory, timeouts
        self._ring = Ring(_RING_BYTES)
        self._in_ring: deque[tuple[str, int]] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def announce(self, frame: Frame, source: RegionRuns) -> list[memoryview | bytes]:
        """Gather the payload into the ring, waiting for space, and return the FRAME with its position there."""
        if frame.num_bytes > _MAX_BYTES:
            raise HandoffFailed(
                f"a frame of {frame.num_bytes} bytes exceeds mooncake's staging memory of {_MAX_BYTES} bytes"
            )
        start = self._wait_for_room(frame)
        self._memory.staging.gather(start, source)
        return [encode(replace(frame, block_ids=(start,)))]

    def taken(self, message: Taken) -> None:
        """Free the oldest frame's space. Raises WireError for any other frame."""
        with self._changed:
            if not self._in_ring or self._in_ring[0] != (message.ticket_id, message.number):
                raise WireError(f"TAKEN names frame {message.number}, which is not the oldest")
            self._in_ring.popleft()
            self._ring.give_back()
            self._changed.notify_all()

    def close(self) -> None:
        """Unregister the ring; if it holds frames, 1 s later: until then the receiver can read it."""
        with self._changed:
            self._closed = True
            in_use = bool(self._in_ring)
            self._changed.notify_all()
        self._memory.close(after_s=_GRACE_S if in_use else 0.0)

    def _wait_for_room(self, frame: Frame) -> int:
        deadline = run_time() + self._timeouts.progress_s
        with self._changed:
            while (start := None if self._closed else self._ring.take(frame.num_bytes)) is None:
                left = deadline - run_time()
                if self._closed or left <= 0:
                    raise LinkLost(f"the receiver took no frame for {self._timeouts.progress_s:g} s")
                self._changed.wait(left)
            self._in_ring.append((frame.ticket_id, frame.number))
        return start


class MooncakeInlet:
    """The receiver's side of one connection: reads the sender's ring, on a thread that is abandoned if it hangs."""

    def __init__(
        self, stream: Stream, memory: Registered, session: str, address: int, num_bytes: int, timeouts: Timeouts, *,
        digests: bool,
    ) -> None:  # fmt: skip
        self._stream, self._memory, self._session, self._digests = stream, memory, session, digests
        self._address, self._num_bytes, self._timeouts = address, num_bytes, timeouts
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kv-mooncake")
        self._reading: Future[None] | None = None

    def move(self, frame: Frame, target: RegionRuns, stop: StopFlag) -> int | None:
        """Read into this side's staging memory, then copy into the slots."""
        (start,) = frame.block_ids if len(frame.block_ids) == 1 else (self._num_bytes,)
        if start + frame.num_bytes > self._num_bytes or not 0 < frame.num_bytes <= _MAX_BYTES:
            raise HandoffFailed(
                f"frame {frame.number} of {frame.num_bytes} bytes at {start} is not within a ring of "
                f"{self._num_bytes} bytes"
            )
        if not self._read(self._address + start, frame.num_bytes, stop):
            return None
        digest = self._memory.staging.scatter(0, target, stop, digests=self._digests)
        if digest is not None:
            self.skip(frame)
        return digest

    def skip(self, frame: Frame) -> None:
        """Free the frame's space in the ring: the stream has no payload."""
        self._stream.send_now(encode(Taken(frame.ticket_id, frame.epoch, frame.number)))

    def close(self) -> None:
        """Release the staging memory as soon as no read into it is in progress."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        reading = self._reading
        if reading is None:
            self._memory.close()
        else:
            reading.add_done_callback(lambda _: self._memory.close())

    def _read(self, address: int, num_bytes: int, stop: StopFlag) -> bool:
        """Fill the staging memory; return False if `stop` was set first. Raises LinkLost."""
        engine, staging = self._memory.engine, self._memory.staging
        self._reading = self._reader.submit(engine.read, self._session, staging, address, num_bytes)
        deadline = run_time() + self._timeouts.progress_s
        while True:
            try:
                self._reading.result(_POLL_S)
            except NotYet:
                if stop.is_set():  # the engine may still write to the staging memory: no more frames
                    raise LinkLost("a ticket ended while mooncake was reading for it") from None
                if run_time() > deadline:
                    raise LinkLost(f"mooncake read nothing for {self._timeouts.progress_s:g} s") from None
                continue
            except OSError as error:
                raise LinkLost(str(error)) from error
            return not stop.is_set()
