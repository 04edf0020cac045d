"""Frames between processes on one host: the number of bytes of the body (4 bytes, big-endian), then the body."""

import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

MAX_BYTES = 2**32 - 1
"""The largest value of the length field; readers of frames from other programs allow less."""
_LENGTH_BYTES = 4
_PIECE_BYTES = 1 << 20


def frame(*parts: bytes) -> bytes:
    """Return the frame whose body is these parts."""
    return b"".join((sum(map(len, parts)).to_bytes(_LENGTH_BYTES, "big"), *parts))


def read_frame(read: Callable[[int], bytes], max_bytes: int = MAX_BYTES) -> bytes | None:
    """Return the next body, None at the end of the stream; `read(count)` returns less than `count` only there.

    Raises ValueError for a body of more than `max_bytes`.
    """
    length = _payload_length(read(_LENGTH_BYTES), max_bytes)
    if length is None:
        return None
    body = read(length)
    return body if len(body) == length else None


def take_frame(received: bytearray, max_bytes: int) -> bytes | None:
    """Remove the first frame from the bytes received so far; return its body, None if it is not complete.

    Raises ValueError for a body of more than `max_bytes`.
    """
    length = _payload_length(received[:_LENGTH_BYTES], max_bytes)
    if length is None or len(received) < _LENGTH_BYTES + length:
        return None
    body = bytes(received[_LENGTH_BYTES : _LENGTH_BYTES + length])
    del received[: _LENGTH_BYTES + length]
    return body


def send_object(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a JSON object as one frame. Raises OSError, including TimeoutError."""
    connection.sendall(frame(json.dumps(message).encode()))


def receive_frame(connection: socket.socket, max_bytes: int) -> bytes | None:
    """Return the next body, None at the end. Raises OSError, and ValueError for one of more than `max_bytes`."""
    return read_frame(lambda count: _read_exactly(connection, count), max_bytes)


def receive_object(connection: socket.socket, max_bytes: int) -> dict[str, Any] | None:
    """Return the next JSON object, None at the end. Raises OSError, and ValueError for an invalid one."""
    body = receive_frame(connection, max_bytes)
    if body is None:
        return None
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError("a message must be an object")
    return message


def _payload_length(head: bytes | bytearray, max_bytes: int) -> int | None:
    if len(head) < _LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "big")
    if length > max_bytes:
        raise ValueError(f"a frame has {length} bytes, but the limit is {max_bytes}")
    return length


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < count and (piece := connection.recv(min(count - len(pieces), _PIECE_BYTES))):
        pieces += piece
    return bytes(pieces)
