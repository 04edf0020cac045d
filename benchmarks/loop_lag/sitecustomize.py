"""Records the late turns of each event loop of a process: Python imports this module if PYTHONPATH has its folder.

A timer of BEAT_S runs on the loop; a line of $LOOP_LAG_FOLDER/PID.txt has, in seconds, the end of a late beat
(CLOCK_MONOTONIC), how late it was, and the loop's waits for a core and its CPU time since the previous beat.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

FOLDER = "LOOP_LAG_FOLDER"
BEAT_S, LATE_S = 0.005, 0.002


async def record(path: Path) -> None:
    """Append late beats to the file until cancelled."""
    with path.open("a", buffering=1) as file:
        while True:
            due, waited_s, ran_s = time.monotonic() + BEAT_S, _waited_s(), time.thread_time()
            await asyncio.sleep(BEAT_S)
            late_s, ran_s = time.monotonic() - due, time.thread_time() - ran_s
            if late_s > LATE_S:
                file.write(f"{due + late_s:.6f} {late_s:.6f} {_waited_s() - waited_s:.6f} {ran_s:.6f}\n")


def _waited_s() -> float:
    return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9


def _install(folder: Path) -> None:
    run = asyncio.Runner.run

    async def recorded(main: Coroutine[Any, Any, Any]) -> Any:
        recorder = asyncio.create_task(record(folder / f"{os.getpid()}.txt"))
        try:
            return await main
        finally:
            recorder.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await recorder

    asyncio.Runner.run = lambda self, main, **options: run(self, recorded(main), **options)  # type: ignore[method-assign]


if FOLDER in os.environ:
    _install(Path(os.environ[FOLDER]))
