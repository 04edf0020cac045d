"""The event loop that serves: uvloop where it is installed, else asyncio's own."""

import asyncio
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a loop of its own, as asyncio.run does."""
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(main)


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None

    class Loop(uvloop.Loop):
        """uvloop's own clock is as old as the loop's turn, in whole milliseconds: too coarse to measure with."""

        time = staticmethod(monotonic)

    return Loop
