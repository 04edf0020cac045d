"""A sampling profile of a process: code locations of every thread, and CPU seconds in user code and the kernel."""

import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.kv.control import ROOT

_INTERVAL_S = 0.001
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SHOWN = 14


class Sampler:
    """Owns a thread that records, each millisecond, every other thread's innermost frame in our own files.

    A call that holds the GIL is sampled when it ends, at the line that made the call; figures are shares, not times.
    """

    def __init__(self) -> None:
        sys.setswitchinterval(_INTERVAL_S / 2)
        self._places: Counter[tuple[str, str]] = Counter()
        self._samples, self._lock, self._cpu = 0, threading.Lock(), cpu_seconds()
        threading.Thread(target=self._run, name="sampler", daemon=True).start()

    def take(self) -> dict[str, Any]:
        """Return shares of wall time by thread and location, and CPU seconds by thread, since the last call."""
        now = cpu_seconds()
        with self._lock:
            places, samples = self._places, max(1, self._samples)
            self._places, self._samples = Counter(), 0
        before, self._cpu = self._cpu, now
        return {
            "places": [
                {"thread": thread, "place": place, "share": round(count / samples, 3)}
                for (thread, place), count in places.most_common(_SHOWN)
            ],
            "cpu": {
                name: {"user_s": round(user - before.get(name, (0, 0))[0], 2),
                       "kernel_s": round(kernel - before.get(name, (0, 0))[1], 2)}
                for name, (user, kernel) in now.items()
            },
        }  # fmt: skip

    def _run(self) -> None:
        mine = threading.get_ident()
        while True:
            time.sleep(_INTERVAL_S)
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            with self._lock:
                self._samples += 1
                for ident, frame in sys._current_frames().items():
                    if ident != mine:
                        self._places[names.get(ident, "?"), place_of(frame)] += 1


def place_of(frame: FrameType | None) -> str:
    """Return "file:function:line" of our innermost frame, and the library function running under it, if any."""
    inner = frame
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and ".venv" not in path.parts:
            place = f"{path.relative_to(ROOT)}:{frame.f_code.co_name}:{frame.f_lineno}"
            return place if inner is frame or inner is None else f"{place} in {inner.f_code.co_name}"
        frame = frame.f_back
    return inner.f_code.co_name if inner is not None else "?"


def cpu_seconds() -> dict[str, tuple[float, float]]:
    """Return (user, kernel) CPU seconds of every thread by name and number; native threads by the kernel's name."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    seconds = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            text = (task / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # the thread has ended
        name, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
        seconds[f"{names.get(int(task.name), name)} {task.name}"] = (
            int(fields[11]) * _TICK_S,
            int(fields[12]) * _TICK_S,
        )
    return seconds
