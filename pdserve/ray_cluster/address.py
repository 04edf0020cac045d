"""Parse --address, the address of the Ray cluster. Pure."""

import re
from ipaddress import ip_address

from wire.errors import ConfigError

AUTO = "auto"
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")


def parse_address(text: str) -> str:
    """Return --address as Ray expects it: `auto` or HOST:PORT of the head's control store. Raises ConfigError."""
    if text == AUTO:
        return text
    if text.startswith("ray://"):
        raise ConfigError(
            f"--address {text}: Ray's client protocol is not supported: the scheduler must run on a cluster node; "
            "use the HOST:PORT that `ray start --head` printed, 6379 by default"
        )
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--address {text!r} is not a Ray cluster's address: write HOST:PORT, such as 10.0.0.18:6379, or auto"
        )
    port = int(match["port"])
    if not 0 < port < 65536:
        raise ConfigError(f"--address {text}: port {port} is not in 1..65535")
    return text


def split(address: str) -> tuple[str, int]:
    """Return host and port of a parsed HOST:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether the address is only reachable from this host."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
