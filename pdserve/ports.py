"""Free ports of this machine, found by binding."""

import errno
import socket
from contextlib import ExitStack

from wire.errors import ConfigError


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
    """Return `count` different ports nothing listens on now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind((host, 0))
        return tuple(int(listener.getsockname()[1]) for listener in sockets)
