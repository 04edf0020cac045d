"""The event loop that serves: uvloop where it is installed, else asyncio's own."""

import asyncio
import contextlib
import resource
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

MOST_FILES = 65_536
T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a loop of its own, as asyncio.run does, with as many open files as the system allows."""
    raise_file_limit()
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(main)


def raise_file_limit(most: int = MOST_FILES) -> int:
    """Raise the soft limit of open files, one a connection, to the hard one, `most` at most; return what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None

    class Loop(uvloop.Loop):
        """uvloop's own clock is as old as the loop's turn, in whole milliseconds: too coarse to measure with."""

        def time(self) -> float:
            return time.monotonic()

    return Loop
