"""A connected non-blocking socket. Every wait has a deadline, by a clock that stops while this process cannot run."""

import contextlib
import math
import select
import socket
import threading
from collections.abc import Callable, Collection, Sequence

from kvtransfer.link_codec import PREFIX, WireError, decode_prefix
from kvtransfer.link_messages import MessageType
from native.ticker import run_time

_MAX_PIECES = 1_024
_SCRATCH_BYTES = 64 << 10
READ_AHEAD_BYTES = 32 << 10  # for streams that carry messages only
_STOP_POLL_S = 0.1


class LinkLost(Exception):
    """The connection was lost, or the peer made no progress within the limit."""


class Stream:
    """Owner of one socket. One thread receives; sending is serialised by a lock; any thread may `shutdown` it.

    The last user calls `close`: a descriptor closed while a thread reads it may be reused for another socket. Any
    thread may read the count `bytes_received`.
    """

    def __init__(self, sock: socket.socket, *, progress_timeout_s: float) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._timeout_s = progress_timeout_s
        self._readable = select.poll()
        self._readable.register(self._fd, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(self._fd, select.POLLOUT)
        self._send_lock = threading.Lock()
        self._scratch = memoryview(bytearray(0))
        self._ahead = memoryview(bytearray(0))  # its bytes [_at, _end) are received but not yet consumed
        self._at = self._end = 0
        self._down = False
        self.bytes_received = 0

    @property
    def socket(self) -> socket.socket:
        """The socket, for transport-specific operations."""
        return self._sock

    @property
    def is_hung_up(self) -> bool:
        """Whether the peer has closed its end, or this end was shut down; reads nothing."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def read_ahead(self, num_bytes: int) -> None:
        """Receive up to `num_bytes` at a time even if less is requested: fewer calls where messages are small.

        Call it only after descriptors were received. If payload follows, read few bytes ahead: they are copied twice.
        """
        self._ahead = memoryview(bytearray(num_bytes))

    def receive_message(
        self, *, first_byte_s: float | None = None, wanted: Collection[MessageType] = frozenset(MessageType),
        whole_s: float = math.inf,
    ) -> tuple[MessageType, bytearray]:  # fmt: skip
        """Return the next message's type and body, which is read only if `wanted`. Raises LinkLost, WireError.

        An idle link may wait forever for the first byte unless `first_byte_s` is set; the rest must make progress, and
        be complete `whole_s` after the call.
        """
        if self._end - self._at >= PREFIX.size:
            kind, length = decode_prefix(self._ahead[self._at : self._at + PREFIX.size])
            if self._end - self._at >= PREFIX.size + length and kind in wanted:
                start = self._at + PREFIX.size
                self._at = start + length
                return kind, bytearray(self._ahead[start : self._at])
        deadline = run_time() + whole_s
        prefix = bytearray(PREFIX.size)
        got = self._receive_some([memoryview(prefix)])
        if got is None:
            self._await_first_byte(first_byte_s)
        self._receive_by(deadline, memoryview(prefix)[got or 0 :])
        kind, length = decode_prefix(prefix)
        if kind not in wanted:
            raise WireError(f"received {kind.name}, expected {' or '.join(one.name for one in wanted)}")
        body = bytearray(length)
        self._receive_by(deadline, memoryview(body))
        return kind, body

    def receive_fds(self) -> tuple[bytes, list[int]]:
        """Return one byte and the descriptors (at most one) received with it. Raises LinkLost."""
        self._await_first_byte(self._timeout_s)
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, 1, 1)
        except OSError as error:
            raise LinkLost(f"the connection broke: {error}") from error
        return data, fds

    def send_fd(self, data: bytes, fd: int) -> None:
        """Send one byte and a descriptor. Raises LinkLost."""
        with self._send_lock:
            deadline = run_time() + self._timeout_s
            while True:
                try:
                    socket.send_fds(self._sock, [data], [fd])
                    return
                except BlockingIOError:
                    self._wait_writable(deadline)
                except OSError as error:
                    raise LinkLost(f"the connection broke: {error}") from error

    def receive_into(self, target: memoryview) -> None:
        """Fill `target`. Raises LinkLost."""
        self.receive_pieces([target], stopped=_never_stop)

    def receive_pieces(self, targets: Sequence[memoryview], *, stopped: Callable[[], bool]) -> int:
        """Fill the targets in order and return the bytes received: fewer than all only if `stopped` returned True.

        `stopped` is called before every read, and ten times a second while the peer sends nothing.
        """
        left, received = [target for target in targets if len(target)], 0
        deadline = run_time() + self._timeout_s
        while left and not stopped():
            count = self._receive_some(left)
            if count is None:
                self._wait_readable(deadline)
                continue
            received += count
            deadline = run_time() + self._timeout_s
            _drop_done(left, count)
        return received

    def drain(self, num_bytes: int) -> None:
        """Read and discard `num_bytes`. Raises LinkLost."""
        if not len(self._scratch):
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        while num_bytes > 0:
            count = min(num_bytes, _SCRATCH_BYTES)
            self.receive_into(self._scratch[:count])
            num_bytes -= count

    def send(self, pieces: Sequence[memoryview | bytes], progressed: Callable[[], None] | None = None) -> None:
        """Send all pieces. Raises LinkLost if the peer accepts nothing for the progress timeout.

        Once a send has had to wait, `progressed` is called after every write.
        """
        left, waited = [memoryview(piece) for piece in pieces if len(piece)], False
        with self._send_lock:
            deadline = run_time() + self._timeout_s
            while left:
                try:
                    count = self._sock.sendmsg(left[:_MAX_PIECES])
                except BlockingIOError:
                    self._wait_writable(deadline)
                    waited = True
                    continue
                except OSError as error:
                    raise LinkLost(f"the connection broke: {error}") from error
                deadline = run_time() + self._timeout_s
                _drop_done(left, count)
                if waited and progressed is not None:
                    progressed()

    def send_now(self, data: bytes) -> None:
        """Send a short answer without blocking; the connection of a peer that does not read its answers is cut."""
        with self._send_lock, contextlib.suppress(OSError):
            try:
                whole = self._sock.send(data) == len(data)
            except BlockingIOError:
                whole = False
            if not whole:
                self.shutdown()

    def shutdown(self) -> None:
        """Wake every thread that waits on this stream; they get LinkLost."""
        self._down = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket: called by the last user, when no other thread receives any more."""
        self.shutdown()
        with self._send_lock:
            self._sock.close()

    def _receive_by(self, deadline: float, target: memoryview) -> None:
        if self.receive_pieces([target], stopped=lambda: run_time() > deadline) < len(target):
            raise LinkLost("the peer did not complete a message in time")

    def _receive_some(self, targets: list[memoryview]) -> int | None:
        """Receive the available bytes into the targets; return None if there are none. Raises LinkLost."""
        if self._at == self._end:
            if len(self._ahead) <= len(targets[0]):
                return self._receive_from_socket(targets[:_MAX_PIECES])
            count = self._receive_from_socket([self._ahead])
            if count is None:
                return None
            self._at, self._end = 0, count
        count = min(len(targets[0]), self._end - self._at)
        targets[0][:count] = self._ahead[self._at : self._at + count]
        self._at += count
        return count

    def _receive_from_socket(self, targets: list[memoryview]) -> int | None:
        try:
            count = self._sock.recvmsg_into(targets)[0]
        except BlockingIOError:
            return None
        except OSError as error:
            raise LinkLost(f"the connection broke: {error}") from error
        if count == 0:
            raise LinkLost("the peer closed the connection")
        self.bytes_received += count
        return count

    def _await_first_byte(self, first_byte_s: float | None) -> None:
        if first_byte_s is not None:
            if not self._readable.poll(first_byte_s * 1000):
                raise LinkLost(f"nothing was received for {first_byte_s:g} s")
            return
        while not self._readable.poll(1000):
            if self._down:
                raise LinkLost("the connection was closed here")

    def _wait_readable(self, deadline: float) -> None:
        if not self._readable.poll(_STOP_POLL_S * 1000) and run_time() > deadline:
            raise LinkLost(f"the peer sent nothing for {self._timeout_s:g} s in the middle of a message")

    def _wait_writable(self, deadline: float) -> None:
        if not self._writable.poll(_STOP_POLL_S * 1000) and run_time() > deadline:
            raise LinkLost(f"the peer accepted no data for {self._timeout_s:g} s")


def expect(stream: Stream, wanted: MessageType, *, timeout_s: float) -> bytearray:
    """Return the body of the next message, which must be `wanted` and complete in time. Raises LinkLost, WireError."""
    return stream.receive_message(first_byte_s=timeout_s, wanted=(wanted,), whole_s=timeout_s)[1]


def _drop_done(left: list[memoryview], count: int) -> None:
    done = 0
    for piece in left:
        if count < len(piece):
            break
        count -= len(piece)
        done += 1
    del left[:done]
    if count:
        left[0] = left[0][count:]


def _never_stop() -> bool:
    return False
