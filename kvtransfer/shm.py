"""Shared memory transport: the sender hands over its pool's memfd, the receiver maps it read-only and copies.

    Unix socket, abstract name | b"F" with the memfd (SCM_RIGHTS) | HELLO ... FRAME headers, with the sender's blocks

The seals are what makes it safe: nobody can shrink the pool under the reader or map it for writing.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence

from kvtransfer.digest import copy_and_digest
from kvtransfer.frame import Frame, WireError, encode
from kvtransfer.hello import Hello
from kvtransfer.slots import SlotMap, Window, pair
from kvtransfer.stream import Stream
from wire.errors import HandoffFailed, Unavailable
from wire.kv_layout import PoolLayout
from wire.types import KvEndpoint

F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; Python's fcntl has no name for it
POOL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
_LEAD = b"F"


def host_id() -> str:
    """Return what two processes share exactly when they reach each other's abstract sockets."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    return f"{boot_id}/{os.stat('/proc/self/ns/net').st_ino}"


class ShmOutlet:
    """The sender's side. `fd` is its pool's memfd, None where the pool is no host memory."""

    name = "shm"

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._host_id = host_id()

    def reaches(self, endpoint: KvEndpoint) -> bool:
        """Only on this host and in this network namespace."""
        return self._fd is not None and endpoint.transport == self.name and endpoint.host_id == self._host_id

    def connect(self, endpoint: KvEndpoint, *, timeout_s: float, progress_timeout_s: float) -> Stream:
        """Connect to the abstract name and hand over the pool."""
        assert self._fd is not None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect("\0" + endpoint.address)
            socket.send_fds(sock, [_LEAD], [self._fd])
        except BaseException:
            sock.close()
            raise
        return Stream(sock, progress_timeout_s=progress_timeout_s)

    def announce(self, frame: Frame, pieces: Sequence[memoryview]) -> list[memoryview | bytes]:
        """The header alone: it names the blocks."""
        return [encode(frame)]


class ShmInlet:
    """The receiver's side of one connection: owner of the mapping of the sender's pool."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._fd: int | None = None
        self._map: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._slots: SlotMap | None = None

    def greet(self) -> None:
        """Take the descriptor; only processes of the same user are served."""
        credentials = self._stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("3i", credentials)
        if uid != os.geteuid():
            raise WireError(f"user {uid} connected, this is user {os.geteuid()}")
        data, fds = self._stream.receive_fds()
        if fds:
            self._fd = fds[0]
        if data != _LEAD or self._fd is None:
            raise WireError(f"{data!r} and {len(fds)} descriptors came before HELLO")

    def admit(self, hello: Hello) -> None:
        """Check seals and size and map the pool read-only. Raises Unavailable with both values."""
        assert self._fd is not None
        layout = PoolLayout(hello.tensors, num_blocks=hello.num_blocks, block_size=hello.block_size)
        try:
            seals = fcntl.fcntl(self._fd, fcntl.F_GET_SEALS)
            size = os.fstat(self._fd).st_size
        except OSError as error:
            raise Unavailable(f"the pool of {hello.sender_id} is no memfd: {error}") from error
        if seals & POOL_SEALS != POOL_SEALS:
            raise Unavailable(f"the pool of {hello.sender_id} has seals {seals:#x}, {POOL_SEALS:#x} are wanted")
        if size != layout.total_bytes:
            raise Unavailable(f"the pool of {hello.sender_id} has {size} bytes, its layout {layout.total_bytes}")
        try:
            self._map = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            raise Unavailable(f"the pool of {hello.sender_id} cannot be mapped: {error}") from error
        self._view, self._slots = memoryview(self._map), SlotMap(layout)

    def move(self, frame: Frame, targets: Sequence[memoryview], stopped: Callable[[], bool]) -> int | None:
        """Copy from the sender's blocks into the targets, digesting on the way."""
        assert self._slots is not None
        start = frame.start % self._slots.layout.block_size
        where = Window(frame.block_ids, start, start + frame.end - frame.start)
        try:
            sources = self._slots.pieces(self._view, frame.tensor, where)
        except IndexError as error:
            raise HandoffFailed(
                f"frame {frame.number} names {len(frame.block_ids)} blocks for tokens "
                f"[{frame.start}, {frame.end}): {error}"
            ) from error
        return copy_and_digest(pair(sources, targets), stopped=stopped)

    def skip(self, frame: Frame) -> None:
        """Nothing of a frame is in the stream but its header."""

    def close(self) -> None:
        """Unmap the pool and close its descriptor."""
        self._slots = None
        self._view.release()
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a slice still in a traceback: unmapped when that is gone
                self._map.close()
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


def listen() -> tuple[socket.socket, KvEndpoint]:
    """Listen on a random abstract name."""
    name = f"pdserve-kv-{secrets.token_hex(16)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind("\0" + name)
    sock.listen(128)
    return sock, KvEndpoint("shm", name, host_id())
