"""Threads for work that is too long for the event loop: few, and behind it in line for the processor."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from ranktable_tools.core_quota import usable_threads

P = ParamSpec("P")
T = TypeVar("T")
_NICER = 5


class SideThreads:
    """Owns the threads, half as many as cores at most, so that a burst leaves the loop a core; without work none."""

    def __init__(self) -> None:
        most = max(1, usable_threads() // 2)
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="pdserve-side", initializer=_stand_back)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what `work` returns, from one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args, **kwargs))

    def close(self) -> None:
        """Start nothing more; what runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _stand_back() -> None:
    """Let this thread give way, where the system knows threads of different niceness."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else a thread of the library's own does the work
    with contextlib.suppress(OSError, AttributeError):
        me = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, me, os.getpriority(os.PRIO_PROCESS, me) + _NICER)
