"""A Unix socket between rank 0 and one other rank: messages of a kind, a payload, and optional file descriptors.

Each message is a frame (frames.py) whose body is the kind, one byte, and the payload. Descriptors travel with the first
byte.
"""

import os
import select
import socket
from array import array
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, Self, TypeVar

from native.ticker import run_time
from processes.frames import frame, read_frame

_MAX_BYTES = 256 << 20  # a step of 8,192 image tokens of 8,192 values has 128 MiB in bfloat16
_MAX_FDS = 4
_FD = array("i")
_FD_BYTES = socket.CMSG_LEN(_MAX_FDS * _FD.itemsize)


K = TypeVar("K", bound=IntEnum)


class ChannelClosed(ConnectionError):
    """The other process has closed its end, or exited."""


@dataclass(frozen=True, slots=True)
class Message(Generic[K]):
    """One message; the receiver owns the descriptors."""

    kind: K
    payload: bytes
    fds: tuple[int, ...] = ()


class Channel(Generic[K]):
    """Owner of one end, for messages of `kinds`. One thread may send and one receive, each with its own deadline."""

    def __init__(self, end: socket.socket, kinds: type[K]) -> None:
        self._socket, self._kinds = end, kinds

    def send(self, kind: K, payload: bytes = b"", *, timeout_s: float, fds: tuple[int, ...] = ()) -> None:
        """Send one message. Raises ChannelClosed, or TimeoutError if the other end does not read it in time."""
        deadline = run_time() + timeout_s
        data = memoryview(frame(bytes((kind,)), payload))
        while data:
            sent = self._send_some(data, fds)
            if sent:
                data, fds = data[sent:], ()
            elif not self._is_ready(select.POLLOUT, deadline):
                raise TimeoutError(f"a message was not accepted within {timeout_s:g} s")

    def has_more(self, timeout_s: float) -> bool:
        """Return whether a message or the end of the stream arrives within the time. Raises ChannelClosed."""
        return self._is_ready(select.POLLIN, run_time() + timeout_s)

    def receive(self, timeout_s: float | None) -> Message[K]:
        """Return the next message. Raises ChannelClosed, TimeoutError, or ValueError for an invalid one.

        None waits as long as the other process lives: the kernel closes the socket when that process exits.
        """
        deadline = None if timeout_s is None else run_time() + timeout_s
        fds: list[int] = []
        try:
            body = read_frame(lambda count: self._receive_exactly(count, deadline, fds), _MAX_BYTES)
            if not body:
                raise ValueError("a message has no kind")
            return Message(self._kinds(body[0]), body[1:], tuple(fds))
        except _Late:
            _close_all(fds)
            raise TimeoutError(f"no message arrived within {timeout_s:g} s") from None
        except BaseException:
            _close_all(fds)
            raise

    def close(self) -> None:
        """Close our end. Idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _receive_exactly(self, length: int, deadline: float | None, fds: list[int]) -> bytes:
        data = bytearray()
        while len(data) < length:
            piece = self._receive_some(length - len(data), fds)
            if piece is not None:
                data += piece
            elif not self._is_ready(select.POLLIN, deadline):
                raise _Late
        return bytes(data)

    def _send_some(self, data: memoryview, fds: tuple[int, ...]) -> int:
        """Return how many bytes the socket accepted without blocking."""
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            return self._socket.sendmsg([data], passed, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelClosed(f"the other process closed the connection: {error}") from error

    def _receive_some(self, length: int, fds: list[int]) -> bytes | None:
        """Return the available bytes, None if there are none yet; append descriptors received with them to `fds`."""
        try:
            piece, passed, _, _ = self._socket.recvmsg(length, _FD_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosed(f"the other process closed the connection: {error}") from error
        for level, kind, came in passed:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.extend(array("i", came[: len(came) - len(came) % _FD.itemsize]))
        if not piece:
            raise ChannelClosed("the other process closed the connection")
        return piece

    def _is_ready(self, event: int, deadline: float | None) -> bool:
        """Wait for an event or the end of the socket; a timeout on the socket itself would apply to both threads.

        Raises ChannelClosed.
        """
        poll = select.poll()
        try:
            poll.register(self._socket, event)
        except (OSError, ValueError) as error:  # closed by another thread: it has no descriptor any more
            raise ChannelClosed(f"our end is closed: {error}") from error
        while deadline is not None:
            left_s = deadline - run_time()
            if poll.poll(max(0.0, left_s) * 1000):
                return True
            if left_s <= 0:
                return False
        return bool(poll.poll(None))


class _Late(Exception):
    """The deadline has passed."""


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
