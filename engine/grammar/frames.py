"""Messages between server and compiling child: JSON objects, each after its length (4 bytes, big-endian)."""

import json
import socket
from typing import Any

Message = dict[str, Any]
_LENGTH_BYTES = 4
_MOST_BYTES = 256 * 1024 * 1024  # the limit of a form after JSON escaping


def send(connection: socket.socket, message: Message) -> None:
    """Send one message. Raises OSError, including TimeoutError."""
    body = json.dumps(message).encode()
    connection.sendall(len(body).to_bytes(_LENGTH_BYTES, "big") + body)


def receive(connection: socket.socket) -> Message | None:
    """Return the next message, None at the end. Raises OSError, and ValueError for an invalid message."""
    head = _exactly(connection, _LENGTH_BYTES)
    if head is None:
        return None
    length = int.from_bytes(head, "big")
    if length > _MOST_BYTES:
        raise ValueError(f"a message of {length} bytes exceeds {_MOST_BYTES}")
    body = _exactly(connection, length)
    if body is None:
        return None
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError("a message must be an object")
    return message


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    pieces = bytearray()
    while len(pieces) < count:
        piece = connection.recv(min(count - len(pieces), 1 << 20))
        if not piece:
            return None
        pieces += piece
    return bytes(pieces)
