"""Threads for work too long for the event loop: few, and with lower priority."""

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
    """Owner of the threads: at most half as many as cores, so that the loop keeps a core; none without work."""

    def __init__(self) -> None:
        num_threads = max(1, usable_threads() // 2)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="pdserve-side", initializer=_lower_priority)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` on one of the threads and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args, **kwargs))

    def close(self) -> None:
        """Start nothing more; running work finishes by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _lower_priority() -> None:
    """Lower this thread's priority, if the system supports a niceness per thread."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else the library uses its own threads
    with contextlib.suppress(OSError, AttributeError):
        me = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, me, os.getpriority(os.PRIO_PROCESS, me) + _NICER)
