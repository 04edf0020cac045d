"""Find the descendants of this process in /proc and kill them. Linux."""

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
    """Parent, session and start time, in clock ticks since boot, of a running process."""

    parent: int
    session: int
    started: int


def end_descendants(timeout_s: float) -> bool:
    """Kill all descendants of this process; return whether they have ended within `timeout_s`.

    Processes orphaned meanwhile are found by their session, if a descendant of this process started that session.
    """
    deadline, sessions = time.monotonic() + timeout_s, set[int]()
    while True:
        places = read_processes()
        sessions = inhabited(sessions, places)
        found = _descendants_of(os.getpid(), places, sessions)
        if not found:
            return True
        sessions |= {places[pid].session for pid in found} - {os.getsid(0)}
        for pidfd in [pidfd for pid in found if (pidfd := end_process(pid, places[pid].started)) is not None]:
            wait_end(pidfd, deadline)
            os.close(pidfd)
        if time.monotonic() >= deadline:
            return False


def inhabited(sessions: Collection[int], places: Mapping[int, ProcessPlace]) -> set[int]:
    """Return the `sessions` that still have a process: the number of an empty one may be reused by others."""
    return {place.session for place in places.values()}.intersection(sessions)


def end_process(pid: int, started: int) -> int | None:
    """Kill the process with this pid and start time; return its pidfd, None where it is gone.

    The kernel reuses pids: the start time is checked after the pidfd pins the process and before the signal.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    place = _place(Path(f"/proc/{pid}"))
    if place is None or place.started != started:
        os.close(pidfd)
        return None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    return pidfd


def wait_end(pidfd: int, deadline: float) -> None:
    """Wait until the process has ended, or until `deadline` on the monotonic clock."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(max(0.0, deadline - time.monotonic()) * 1000)


def read_processes() -> dict[int, ProcessPlace]:
    """Return the running processes by pid, without zombies."""
    folders = [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return {int(folder.name): place for folder in folders if (place := _place(folder)) is not None}


def _descendants_of(own: int, places: Mapping[int, ProcessPlace], sessions: set[int]) -> set[int]:
    found = {pid for pid, place in places.items() if place.session in sessions}
    grown = True
    while grown:
        more = {pid for pid, place in places.items() if place.parent == own or place.parent in found} - found
        found |= more
        grown = bool(more)
    return found - {own}


def _place(folder: Path) -> ProcessPlace | None:
    try:
        stat = (folder / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else ProcessPlace(int(fields[1]), int(fields[3]), int(fields[19]))
