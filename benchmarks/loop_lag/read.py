"""Read what sitecustomize.py recorded: the longest turns of a process's event loop in spans of time."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.loop_lag.sitecustomize import FOLDER

Span = tuple[float, float]


def recording(folder: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of processes whose event loops are recorded in `folder`."""
    own = str(Path(__file__).parent)
    path = os.pathsep.join([own, *filter(None, [environ.get("PYTHONPATH")])])
    return {**environ, "PYTHONPATH": path, FOLDER: str(folder)}


def longest_turn_ms(folder: Path, pid: int, spans: Sequence[Span]) -> tuple[float, float]:
    """Return the longest turn that ended in one of the spans (CLOCK_MONOTONIC), without waits for a core and with."""
    file = folder / f"{pid}.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    found = [(0.0, 0.0)]
    for line in lines:
        ended, late_s, waited_s = map(float, line.split())
        if any(start <= ended <= end for start, end in spans):
            found.append((max(0.0, late_s - waited_s), late_s))
    return 1000 * max(turn for turn, _ in found), 1000 * max(late for _, late in found)
