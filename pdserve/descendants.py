"""The processes that descend from this one, found in /proc, and their end. Linux."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a process that still runs stands among the others."""

    parent: int
    session: int


def end_descendants(timeout_s: float) -> bool:
    """Kill all that descends from this process, and wait until none of it runs, `timeout_s` at most; tell whether.

    What was orphaned on the way is known by its session, where that began below this process.
    """
    deadline, sessions = time.monotonic() + timeout_s, set[int]()
    while True:
        places = _places()
        found = _below(os.getpid(), places, sessions)
        if not found:
            return True
        sessions |= {places[pid].session for pid in found} - {os.getsid(0)}
        for life in [life for pid in found if (life := _killed(pid)) is not None]:
            _wait(life, deadline)
            os.close(life)
        if time.monotonic() >= deadline:
            return False


def _below(own: int, places: Mapping[int, _Place], sessions: set[int]) -> set[int]:
    found = {pid for pid, place in places.items() if place.session in sessions}
    grown = True
    while grown:
        more = {pid for pid, place in places.items() if place.parent == own or place.parent in found} - found
        found |= more
        grown = bool(more)
    return found - {own}


def _killed(pid: int) -> int | None:
    """Kill a process; return a descriptor of its life, None where it is gone."""
    try:
        life = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(life, signal.SIGKILL)
    return life


def _wait(life: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(life, select.POLLIN)
    poll.poll(max(0.0, deadline - time.monotonic()) * 1000)


def _places() -> dict[int, _Place]:
    """Return the processes that run, by pid; zombies are none."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (folder / "stat").read_text(errors="replace")
                state, parent, _, session = stat[stat.rindex(")") + 2 :].split()[:4]
                if state not in "ZX":
                    found[int(folder.name)] = _Place(int(parent), int(session))
    return found
