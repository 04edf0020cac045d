"""Parse one port number from text, and format a count of ports."""

import re

_PORT = re.compile(r"[1-9][0-9]{0,4}")


def parse_port(text: str) -> int | None:
    """Return the port, 1 to 65535, that `text` contains, or None."""
    return int(text) if _PORT.fullmatch(text) and int(text) <= 65535 else None


def counted_ports(number: int) -> str:
    """Return "1 port" or "2 ports"."""
    return f"{number} port" if number == 1 else f"{number} ports"
