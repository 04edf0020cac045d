"""Find which process of this machine listens on a TCP port, from /proc; only root sees other users' processes."""

import contextlib
import os
from collections.abc import Iterator

from ranktable_tools.doctor.machine import Machine

_LISTEN = "0A"
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def listener(machine: Machine, port: int) -> str | None:
    """Return "name (pid 123)", or None if it is not visible."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(machine, port)}
    for pid in _all_pids(machine) if wanted else ():
        if any(link in wanted for link in _links(machine, pid)):
            return f"{(machine.text(f'/proc/{pid}/comm') or '?').strip()} (pid {pid})"
    return None


def _listening_inodes(machine: Machine, port: int) -> Iterator[str]:
    for table in _TABLES:
        for line in (machine.text(table) or "").splitlines():
            words = line.split()
            if len(words) > 9 and words[3] == _LISTEN and words[1].endswith(f":{port:04X}"):
                yield words[9]


def _all_pids(machine: Machine) -> list[str]:
    try:
        return sorted((entry.name for entry in machine.path("/proc").iterdir() if entry.name.isdecimal()), key=int)
    except OSError:
        return []


def _links(machine: Machine, pid: str) -> Iterator[str]:
    folder = machine.path(f"/proc/{pid}/fd")
    try:
        names = os.listdir(folder)
    except OSError:  # another user's process, or one that has exited
        return
    for name in names:
        with contextlib.suppress(OSError):
            yield os.readlink(folder / name)
