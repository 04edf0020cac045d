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


def longest_turn_ms(folder: Path, pid: int, spans: Sequence[Span]) -> dict[str, float]:
    """Return the longest turn that ended in one of the spans (CLOCK_MONOTONIC), by each measure.

    The measures are an upper bound of a turn's CPU time, its length without waits for a core, and its length.
    """
    file = folder / f"{pid}.txt"
    found = [(0.0, 0.0, 0.0)]
    for line in file.read_text().splitlines() if file.exists() else []:
        ended, late_s, waited_s, ran_s = map(float, line.split())
        if any(start <= ended <= end for start, end in spans):
            found.append((ran_s, max(0.0, late_s - waited_s), late_s))
    longest = (1000 * max(column) for column in zip(*found, strict=True))
    return dict(zip(("cpu", "without_waits", "whole"), (round(one, 1) for one in longest), strict=True))
