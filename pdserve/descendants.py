"""The processes that descend from this one, found in /proc, and their end. Linux."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where a process that still runs stands among the others, and when it started, in clock ticks since boot."""

    parent: int
    session: int
    started: int


def end_descendants(timeout_s: float) -> bool:
    """Kill all that descends from this process, and wait until none of it runs, `timeout_s` at most; tell whether.

    What was orphaned on the way is known by its session, where that began below this process.
    """
    deadline, sessions = time.monotonic() + timeout_s, set[int]()
    while True:
        places = _places()
        sessions = inhabited(sessions, places)
        found = _below(os.getpid(), places, sessions)
        if not found:
            return True
        sessions |= {places[pid].session for pid in found} - {os.getsid(0)}
        for life in [life for pid in found if (life := end_process(pid, places[pid].started)) is not None]:
            _wait(life, deadline)
            os.close(life)
        if time.monotonic() >= deadline:
            return False


def inhabited(sessions: Collection[int], places: Mapping[int, ProcessPlace]) -> set[int]:
    """Return those of `sessions` that a process is in: the number of another one may become a stranger's."""
    return {place.session for place in places.values()}.intersection(sessions)


def end_process(pid: int, started: int) -> int | None:
    """Kill the process that has this pid since `started`; return a descriptor of its life, None where it is gone.

    The kernel gives a pid out again: what has it is looked at once the descriptor holds it, before the signal.
    """
    try:
        life = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    place = _place(Path(f"/proc/{pid}"))
    if place is None or place.started != started:
        os.close(life)
        return None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(life, signal.SIGKILL)
    return life


def _below(own: int, places: Mapping[int, ProcessPlace], sessions: set[int]) -> set[int]:
    found = {pid for pid, place in places.items() if place.session in sessions}
    grown = True
    while grown:
        more = {pid for pid, place in places.items() if place.parent == own or place.parent in found} - found
        found |= more
        grown = bool(more)
    return found - {own}


def _wait(life: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(life, select.POLLIN)
    poll.poll(max(0.0, deadline - time.monotonic()) * 1000)


def _places() -> dict[int, ProcessPlace]:
    """Return the processes that run, by pid; zombies are none."""
    folders = [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return {int(folder.name): place for folder in folders if (place := _place(folder)) is not None}


def _place(folder: Path) -> ProcessPlace | None:
    try:
        stat = (folder / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else ProcessPlace(int(fields[1]), int(fields[3]), int(fields[19]))
