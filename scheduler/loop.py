"""The event loop of the scheduler: uvloop if it is installed, else asyncio's own."""

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")
_COLLECT_EVERY = 20_000  # surviving new objects; Python's default is 700


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to completion on a new loop, like asyncio.run."""
    with _rare_collections(), asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Run the garbage collector rarely, and never on imported objects: little of the scheduler's garbage has cycles."""
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
    """Return a new loop, not running."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()

    class Loop(uvloop.Loop):
        """uvloop with a precise clock: its own is updated once per turn, in whole milliseconds."""

        time = staticmethod(monotonic)

    return Loop()
