"""Work beside the event loop: its results and exceptions, the number of threads, and their lower priority."""

import os
import threading

import pytest

from scheduler.side_threads import SideThreads

pytestmark = pytest.mark.anyio


async def test_work_runs_on_another_thread_with_lower_priority() -> None:
    threads = SideThreads()

    def work(number: int, *, name: str) -> tuple[int, str, int, int]:
        me = threading.get_native_id()
        return number, name, me, os.getpriority(os.PRIO_PROCESS, me)

    number, name, thread, nice = await threads.run(work, 3, name="x")
    threads.close()

    assert (number, name) == (3, "x")
    assert thread != threading.get_native_id()
    assert nice == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)


async def test_an_exception_of_the_work_is_raised() -> None:
    threads = SideThreads()

    def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await threads.run(work)
    threads.close()
