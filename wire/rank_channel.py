"""A Unix socket between rank 0 and one other rank: messages of a kind, bytes, and file descriptors where needed.

message | kind, length: 32-bit little-endian | payload |     descriptors travel with the first byte
"""

import os
import select
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Generic, Self, TypeVar

_HEADER = struct.Struct("<II")
_MAX_BYTES = 64 << 20
_MAX_FDS = 4


K = TypeVar("K", bound=IntEnum)


class ChannelClosed(ConnectionError):
    """The other end is gone."""


@dataclass(frozen=True, slots=True)
class Message(Generic[K]):
    """One message; who receives it owns the descriptors."""

    kind: K
    payload: bytes
    fds: tuple[int, ...] = ()


class Channel(Generic[K]):
    """Owns one end, whose messages are of `kinds`. One thread sends and one receives."""

    def __init__(self, end: socket.socket, kinds: type[K]) -> None:
        self._socket, self._kinds = end, kinds

    def send(self, kind: K, payload: bytes = b"", *, timeout_s: float, fds: tuple[int, ...] = ()) -> None:
        """Send one message. Raises ChannelClosed, or TimeoutError if the other end does not take it in time."""
        deadline = time.monotonic() + timeout_s
        data = memoryview(_HEADER.pack(kind, len(payload)) + payload)
        try:
            while data:
                self._socket.settimeout(_left(deadline, timeout_s))
                sent = socket.send_fds(self._socket, [data], fds) if fds else self._socket.send(data)
                data, fds = data[sent:], ()
        except TimeoutError:
            raise TimeoutError(f"a message was not taken within {timeout_s:g} s") from None
        except OSError as error:
            raise ChannelClosed(f"the other end is gone: {error}") from error

    def has_more(self, timeout_s: float) -> bool:
        """Whether a message, or the news that the other end is gone, comes within the time."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def receive(self, timeout_s: float | None) -> Message[K]:
        """Return the next message. Raises ChannelClosed, TimeoutError, or ValueError for what is no message.

        None waits as long as the other end lives: its kernel closes the socket when its process ends.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        fds: list[int] = []
        try:
            number, length = _HEADER.unpack(self._receive_exactly(_HEADER.size, deadline, timeout_s, fds))
            if length > _MAX_BYTES:
                raise ValueError(f"a message of {length} bytes: at most {_MAX_BYTES} are allowed")
            return Message(self._kinds(number), self._receive_exactly(length, deadline, timeout_s, fds), tuple(fds))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def close(self) -> None:
        """Close our end. Idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive_exactly(
        self, length: int, deadline: float | None, timeout_s: float | None, fds: list[int]
    ) -> bytes:  # fmt: skip
        data = bytearray()
        while len(data) < length:
            self._socket.settimeout(None if deadline is None else _left(deadline, timeout_s or 0.0))
            try:
                piece, came, _, _ = socket.recv_fds(self._socket, length - len(data), _MAX_FDS)
            except TimeoutError:
                raise TimeoutError(f"nothing came within {timeout_s:g} s") from None
            except OSError as error:
                raise ChannelClosed(f"the other end is gone: {error}") from error
            fds.extend(came)
            if not piece:
                raise ChannelClosed("the other end is gone")
            data += piece
        return bytes(data)


def _left(deadline: float, timeout_s: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"{timeout_s:g} s are over")
    return left
