"""Ask a scheduler of this host through its door (scheduler/links/admin_socket.py)."""

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from scheduler.links.admin_socket import MAX_LINE_BYTES, door_name, is_same_user
from scheduler.links.probe import MEASURE_TIMEOUT_S
from wire.errors import Incompatible, Unavailable

_CONNECT_TIMEOUT_S = 3.0
_ANSWER_TIMEOUT_S = MEASURE_TIMEOUT_S + 15.0
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - a name to ask by, never bound


class NoAdminSocket(Unavailable):
    """There is none on this host that we may use; the message says why."""


def open_door(base_url: str) -> socket.socket:
    """Return a connection to the door of the scheduler that serves at `base_url`. Raises NoAdminSocket."""
    parts = urlsplit(base_url)
    host, port = parts.hostname or "", parts.port or 80
    addresses = [address for address in _addresses(host, port) if _is_ours(address)]
    for address in dict.fromkeys((*addresses, *(_WILDCARDS if addresses else ()))):
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        door.settimeout(_CONNECT_TIMEOUT_S)
        try:
            door.connect("\0" + door_name(address, port))
        except OSError:
            door.close()
            continue
        if not is_same_user(door):
            door.close()
            raise NoAdminSocket(
                f"the scheduler at {base_url} belongs to another user: only that user and root may measure"
            )
        door.settimeout(_ANSWER_TIMEOUT_S)
        return door
    raise NoAdminSocket(f"no scheduler of this host serves {base_url}: links are measured on the scheduler's own host")


def ask_links(door: socket.socket, num_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield what the scheduler tells, one object at a time, to its end. Raises Unavailable in its words.

    Closing the connection early ends the measurement.
    """
    try:
        door.sendall(json.dumps({"ask": "links", "num_bytes": num_bytes}).encode() + b"\n")
        with door.makefile("rb") as lines:
            while line := lines.readline(MAX_LINE_BYTES + 1):
                told = _parsed(line)
                if "error" in told:
                    raise Unavailable(str(told["error"]))
                if "end" in told:
                    return
                yield told
    except TimeoutError as error:
        raise Unavailable(f"the scheduler said nothing for {_ANSWER_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise Unavailable(f"the scheduler broke off: {error}") from error
    raise Unavailable("the scheduler broke off before it was done: it is busy with other askers, or it ended")


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise Incompatible(f"the scheduler said {len(line)} bytes that are no object: is it of another version?")
    return told


def _is_ours(address: str) -> bool:
    """Tell whether a numeric address is one of this host's: only those can be bound."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _addresses(host: str, port: int) -> list[str]:
    """Return the numeric addresses of a host name; itself for one that is a number."""
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError:
        return [host]
