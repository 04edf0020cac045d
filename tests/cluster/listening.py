"""Which sockets the processes of a cluster listen on, according to the kernel, and which docs/ports.md lists."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

PORTS_MD = Path(__file__).parents[2] / "docs" / "ports.md"
_ACCEPTS = 0x10000  # linux/net.h: __SO_ACCEPTCON


@dataclass(frozen=True, slots=True)
class Listening:
    """One listening socket: `host` is a numeric address, or the name of an abstract Unix socket with its `@`."""

    process: str
    host: str
    port: int | None


def sockets_of(process: str, pid: int) -> set[Listening]:
    """Return what a process and its children listen on; a UDP socket counts too."""
    found = set()
    for one in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        for socket in one.net_connections("inet"):
            if socket.status == psutil.CONN_LISTEN or (socket.status == psutil.CONN_NONE and socket.laddr):
                found.add(Listening(process, socket.laddr.ip, socket.laddr.port))
        found |= {Listening(process, name, None) for name in _unix_names(one.pid)}
    return found


def documented() -> dict[str, str]:
    """Return the sockets of docs/ports.md, each name with its whole row."""
    rows = re.findall(r"^\| ((?:scheduler|instance) [a-z ]+) \|(.*)\|$", PORTS_MD.read_text(), re.M)
    return dict(rows)


def _unix_names(pid: int) -> set[str]:
    """Return the Unix sockets a process listens on: those of its descriptors that /proc/net/unix says accept."""
    names = {}
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & _ACCEPTS:
            names[f"socket:[{fields[6]}]"] = fields[7] if len(fields) > 7 else "(no name)"
    held = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            held.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        except FileNotFoundError:
            continue
    return {name for inode, name in names.items() if inode in held}
