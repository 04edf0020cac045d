"""Find free ports of this machine by binding them."""

import errno
import random
import socket
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path

from wire.errors import ConfigError

_MIN_PORT = 20_000
_TRIES = 100
_given = deque[int](maxlen=256)


def require_free(host: str, port: int, flag: str = "--port") -> None:
    """Raise ConfigError when nothing can listen on host:port, because of another process or of the address itself."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"{flag} {port} is not in 0..65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"--host {host!r} {flag} {port}: no such address ({error})") from error
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            why = "in use by another process" if error.errno == errno.EADDRINUSE else str(error)
            raise ConfigError(f"{flag} {port} on {host}: {why}") from error


def free_ports(count: int, host: str = "127.0.0.1") -> tuple[int, ...]:
    """Return `count` different ports on which nothing listens now.

    Where possible they are outside the range for outgoing connections, so that another process that
    connects somewhere cannot take one before it is used. Ports that the last calls in this process returned are not
    returned again: the processes that will use them may not listen yet.
    """
    with ExitStack() as held:
        ports = tuple(_take(held, host) for _ in range(count))
    _given.extend(ports)
    return ports


def _take(held: ExitStack, host: str) -> int:
    """Return a free port; sockets that it bound are closed with `held`."""
    given = set(_given)
    spare = [port for port in _ports_not_ephemeral() if port not in given]
    listener = held.enter_context(socket.socket())
    for port in random.sample(spare, min(_TRIES, len(spare))):
        with suppress(OSError):
            listener.bind((host, port))
            return port
    while True:
        listener.bind((host, 0))
        port = int(listener.getsockname()[1])
        if port not in given:
            return port
        listener = held.enter_context(socket.socket())  # the one given before stays bound: the next is another port


def _ports_not_ephemeral() -> range:
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return range(0)
    below, above = range(_MIN_PORT, low), range(high + 1, 65536)
    return below if len(below) > len(above) else above
