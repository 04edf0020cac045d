"""Client of the admin socket of a scheduler on this host (scheduler/links/admin_socket.py)."""

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from scheduler.links.admin_socket import MAX_LINE_BYTES, is_same_user, socket_name
from scheduler.links.probe import MEASURE_TIMEOUT_S
from wire.errors import ConfigError, Incompatible, Unavailable

_CONNECT_TIMEOUT_S = 3.0
_ANSWER_TIMEOUT_S = MEASURE_TIMEOUT_S + 15.0
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - part of a socket name, never bound


class NoAdminSocket(Unavailable):
    """This host has no admin socket that this user may use; the message gives the reason."""


def connect_admin(base_url: str) -> socket.socket:
    """Connect to the admin socket of the scheduler that serves at `base_url`. Raises NoAdminSocket."""
    parts = urlsplit(base_url)
    host, port = parts.hostname or "", parts.port or 80
    addresses = [address for address in _addresses(host, port) if _is_ours(address)]
    for address in dict.fromkeys((*addresses, *(_WILDCARDS if addresses else ()))):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_CONNECT_TIMEOUT_S)
        try:
            connection.connect("\0" + socket_name(address, port))
        except OSError:
            connection.close()
            continue
        if not is_same_user(connection):
            connection.close()
            raise NoAdminSocket(
                f"the scheduler at {base_url} belongs to another user: only that user and root may do this"
            )
        connection.settimeout(_ANSWER_TIMEOUT_S)
        return connection
    raise NoAdminSocket(f"no scheduler on this host serves {base_url}: run this on the scheduler's host")


def measure_links(connection: socket.socket, num_bytes: int) -> Iterator[dict[str, Any]]:
    """Measure the links; yield each object the scheduler sends. Raises Unavailable with the scheduler's message.

    Closing the connection early ends the measurement.
    """
    return _ask(connection, {"ask": "links", "num_bytes": num_bytes})


def change_role(connection: socket.socket, instance: str, role: str) -> dict[str, Any]:
    """Give an instance a role; return its previous role (`before`), the new role and the new role's epoch.

    Raises ConfigError for what the user must fix, and Unavailable with the scheduler's message.
    """
    return next(_ask(connection, {"ask": "role", "instance": instance, "role": role}))


def _ask(connection: socket.socket, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as lines:
            while line := lines.readline(MAX_LINE_BYTES + 1):
                message = _parse_message(line)
                if "error" in message:
                    raise (ConfigError if message.get("invalid") else Unavailable)(str(message["error"]))
                if "end" in message:
                    return
                yield message
    except TimeoutError as error:
        raise Unavailable(f"the scheduler sent nothing for {_ANSWER_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise Unavailable(f"the connection to the scheduler failed: {error}") from error
    raise Unavailable("the scheduler closed the connection early: it has stopped, or has too many admin clients")


def _parse_message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise Incompatible(
            f"the scheduler sent {len(line)} bytes that are not a JSON object: does it run another version?"
        )
    return message


def _is_ours(address: str) -> bool:
    """Return whether a numeric address belongs to this host: only such addresses can be bound."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _addresses(host: str, port: int) -> list[str]:
    """Return the numeric addresses of a host name; a numeric address is returned unchanged."""
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError:
        return [host]
