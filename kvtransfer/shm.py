"""Shared memory transport: the sender passes its pool's memfd, the receiver maps it read-only and copies.

    Unix socket, abstract name | HELLO, WELCOME | b"F" with the memfd (SCM_RIGHTS) | READY, FRAME headers with blocks

The seals make it safe: no process can shrink the pool under the reader or map it for writing.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct

from kvtransfer.device_memory import device_memory
from kvtransfer.digest import RegionRuns, StopFlag
from kvtransfer.hello import Hello
from kvtransfer.interface import PoolMemory
from kvtransfer.link_codec import WireError
from kvtransfer.link_messages import Frame, Taken
from kvtransfer.named_windows import WindowNamer, WindowNames
from kvtransfer.slots import SlotMap
from kvtransfer.staging import move
from kvtransfer.stream import READ_AHEAD_BYTES, Stream
from kvtransfer.transport_interface import Timeouts, TransportTraits
from wire.errors import HandoffFailed, Unavailable
from wire.kv_layout import Heads
from wire.link_reasons import ELSEWHERE
from wire.types import KvEndpoint

F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; Python's fcntl has no name for it
POOL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
_LEAD = b"F"


def host_id() -> str:
    """Return an id that two processes share if and only if they can reach each other's abstract sockets."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    return f"{boot_id}/{os.stat('/proc/self/ns/net').st_ino}"


class ShmTransport:
    """Implements transport.Transport over Unix sockets."""

    traits = TransportTraits("shm", one_host=True, reads_pool=True)

    def __init__(self, memory: PoolMemory) -> None:
        self._fd, self._device = memory.fd, device_memory(memory)
        self._host_id = host_id()

    def unusable(self) -> str | None:
        """It needs a pool in host memory."""
        if self._device is not None:
            return f"the KV pool is on {self._device.device}: peers can map host memory only"
        return "the KV pool has no descriptor with which peers could map it" if self._fd is None else None

    def bind(self, host: str | None, source: str | None) -> None:
        """Do nothing: a Unix socket has no address."""

    def unreachable(self, endpoint: KvEndpoint) -> str | None:
        """Only this host and network namespace can be reached."""
        return None if endpoint.host_id == self._host_id else ELSEWHERE

    def connect(self, endpoint: KvEndpoint, timeouts: Timeouts) -> Stream:
        """Connect to the abstract socket name."""
        return connect(endpoint.address, timeouts)

    def outlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> "ShmOutlet":
        """Pass the pool's descriptor to the receiver."""
        assert self._fd is not None
        stream.send_fd(_LEAD, self._fd)
        return ShmOutlet()

    def inlet(self, stream: Stream, hello: Hello, timeouts: Timeouts) -> "ShmInlet":
        """Receive the pool, check seals and size and map it read-only. Raises Unavailable with both values."""
        data, fds = stream.receive_fds()
        if data != _LEAD or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise WireError(f"received {data!r} and {len(fds)} descriptors, expected the pool")
        try:
            stream.read_ahead(READ_AHEAD_BYTES)
            return ShmInlet(fds[0], hello)
        finally:
            os.close(fds[0])


class ShmOutlet:
    """The sender's side of one connection: sends headers only."""

    def __init__(self, max_frame_bytes: int = 16 << 20) -> None:
        self.max_frame_bytes, self._namer = max_frame_bytes, WindowNamer()

    def announce(self, frame: Frame, source: RegionRuns) -> list[memoryview | bytes]:
        """Return the header, which names the blocks."""
        return [self._namer.encode(frame)]

    def taken(self, message: Taken) -> None:
        """Do nothing: the whole pool is shared, so there is nothing to release."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class ShmInlet:
    """The receiver's side of one connection: owner of the mapping of the sender's pool."""

    def __init__(self, fd: int, hello: Hello) -> None:
        layout = hello.layout
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size = os.fstat(fd).st_size
        except OSError as error:
            raise Unavailable(f"the pool of {hello.sender_id} is not a memfd: {error}") from error
        if seals & POOL_SEALS != POOL_SEALS:
            raise Unavailable(f"the pool of {hello.sender_id} has seals {seals:#x}, but {POOL_SEALS:#x} are required")
        if size != layout.total_bytes:
            raise Unavailable(
                f"the pool of {hello.sender_id} has {size} bytes, but its layout has {layout.total_bytes}"
            )
        try:
            self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            raise Unavailable(f"the pool of {hello.sender_id} cannot be mapped: {error}") from error
        self._view, self._digests = memoryview(self._map), hello.digests
        self._slots, self._names = SlotMap(layout, self._view), WindowNames(layout.block_size)

    def move(self, frame: Frame, target: RegionRuns, stop: StopFlag) -> int | None:
        """Copy from the sender's blocks to the target, with digests if the link has them."""
        return move_blocks(self._slots, self._names, frame, target, stop, digests=self._digests)

    def skip(self, frame: Frame) -> None:
        """Record the header's block ids, which later frames may refer to; the stream carries no payload to skip."""
        skip_blocks(self._names, frame)

    def close(self) -> None:
        """Unmap the pool, after dropping the slots, which hold a view of it too."""
        del self._slots
        self._view.release()
        with contextlib.suppress(BufferError):  # a traceback still holds a slice: unmapped once that is gone
            self._map.close()


def move_blocks(
    slots: SlotMap, names: WindowNames, frame: Frame, target: RegionRuns, stop: StopFlag, *, digests: bool
) -> int | None:
    """Copy a frame from the blocks it names in the sender's mapped pool. See transport.Inlet.move."""
    window = names.window_of(frame)
    try:
        heads = Heads(frame.head_start, frame.head_end)
        source = slots.place(frame.tensor, window, heads, frame.num_tensors)
        return move(source, target, stop, digests=digests)
    except (IndexError, ValueError) as error:
        raise HandoffFailed(
            f"frame {frame.number} cannot be read: its tokens are [{frame.start}, {frame.end}), its number of blocks "
            f"is {len(window.block_ids)}: {error}"
        ) from error


def skip_blocks(names: WindowNames, frame: Frame) -> None:
    """Record the block ids of a frame that is not needed."""
    with contextlib.suppress(HandoffFailed):
        names.window_of(frame)


def connect(name: str, timeouts: Timeouts) -> Stream:
    """Connect to an abstract name. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeouts.connect_s)
        sock.connect("\0" + name)
    except BaseException:
        sock.close()
        raise
    return Stream(sock, progress_timeout_s=timeouts.progress_s)


def is_same_user(sock: socket.socket) -> bool:
    """Return whether the process at the other end runs as the same user: another user's process is refused."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())


def listen() -> tuple[socket.socket, str]:
    """Listen on a random abstract name; return it without its leading NUL."""
    name = f"pdserve-kv-{secrets.token_hex(16)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind("\0" + name)
    sock.listen(128)
    return sock, name
