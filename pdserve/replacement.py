"""The phases of replacing a dead process, and their durations. Pure: the marks and the clock are passed in.

death seen --process--> weights begin --weights--> loaded --session--> the scheduler's session --serving--> ready
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from telemetry.start_marks import LOADED, PROCESS, SESSION, WARM, WEIGHTS, Mark

SERVING = "serving"
_ENDS = (("process", WEIGHTS), ("weights", LOADED), ("session", SESSION), (SERVING, SERVING))
NAMES = tuple(name for name, _ in _ENDS)


class Phase(NamedTuple):
    """One phase of a replacement: its duration, and the CPU time of the new process in it."""

    name: str
    seconds: float
    cpu_s: float


def phases_of(died_at: float, marks: Mapping[str, Mark], serving: float | None = None) -> tuple[Phase, ...]:
    """Return the completed phases in order; `died_at` and `serving` are times on the marks' clock.

    A spare's CPU time before it received its command line is not counted. A process without marks has one phase.
    """
    began, cpu_s = died_at, marks[PROCESS].cpu_s if WARM in marks and PROCESS in marks else 0.0
    found: list[Phase] = []
    for name, mark in _ENDS:
        end = marks.get(mark)
        if mark == SERVING and serving is not None:
            end = Mark(SERVING, serving, cpu_s)
        if end is None or end.at < died_at:
            continue
        found.append(Phase(name, round(end.at - began, 3), round(end.cpu_s - cpu_s, 3)))
        began, cpu_s = end.at, end.cpu_s
    return tuple(found)


def describe(phases: Sequence[Phase]) -> str:
    """Return the phases with their times: `process 0.7 s (CPU 0.1 s), weights 1.9 s (CPU 1.8 s)`."""
    return ", ".join(
        f"{one.name} {one.seconds:.1f} s" + (f" (CPU {one.cpu_s:.1f} s)" if one.cpu_s else "") for one in phases
    )
