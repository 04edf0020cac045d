"""Listening sockets of the HTTP server: its own, and one that it shares with other schedulers of its host."""

import errno
import os
import socket
from collections.abc import MutableMapping

from wire.errors import ConfigError

BACKLOG = 2048
SHARED_VARIABLE = "PDSERVE_SHARED_SOCKET"
"""Environment variable with the descriptor of the inherited listening socket."""


def listen(host: str, port: int) -> socket.socket:
    """Return a bound, listening socket; port 0 is any free one. Raises ConfigError naming a busy port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host} cannot be resolved: {error.strerror}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        in_use = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened: {error.strerror}"
        raise ConfigError(f"port {port} on {host} {in_use}") from error
    return bound


def take_shared(environ: MutableMapping[str, str]) -> socket.socket | None:
    """Return the socket that the supervisor opened, None without one. The variable is removed. Raises ConfigError."""
    text = environ.pop(SHARED_VARIABLE, None)
    if text is None:
        return None
    try:
        os.set_inheritable(int(text), False)
        return socket.socket(fileno=int(text))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{SHARED_VARIABLE}={text!r} is not an inherited socket: {error}") from error
