"""The event loop that serves: uvloop where it is installed, else asyncio's own."""

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")
_COLLECT_EVERY = 20_000  # new objects that are still there; Python's own figure is 700


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a loop of its own, as asyncio.run does."""
    with _rare_collections(), asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let the garbage collector look seldom, and never at what was imported: hardly any garbage here has cycles."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a loop that does not run yet."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()

    class Loop(uvloop.Loop):
        """uvloop's own clock is as old as the loop's turn, in whole milliseconds: too coarse to measure with."""

        time = staticmethod(monotonic)

    return Loop()
