"""A thread that runs tasks in order: one issues the group operations of a device, and one sets up and frees a group."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from native.ticker import run_time

_T = TypeVar("_T")
_JOIN_S = 2.0


def result_within(future: "Future[_T]", timeout_s: float) -> _T:
    """Return a future's result. Raises TimeoutError after `timeout_s` of time in which this process could run."""
    deadline = run_time() + timeout_s
    while True:
        try:
            return future.result(max(0.0, deadline - run_time()))
        except TimeoutError:
            if future.done():
                return future.result()
            if run_time() >= deadline:
                raise


class IssueQueue:
    """Owner of the thread."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, task: Callable[[], _T]) -> "Future[_T]":
        """Queue `task` without blocking; the future gets its result or exception."""
        future: Future[_T] = Future()
        self._tasks.put((future, task))
        return future

    def close(self) -> None:
        """End the thread after the queued tasks."""
        self._tasks.put(None)
        if threading.current_thread() is not self.thread:
            self.thread.join(_JOIN_S)

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(task())
                except BaseException as error:  # noqa: BLE001  the outermost frame of a task: passed to the future
                    future.set_exception(error)
            del item, future, task  # a task refers to its group, and the traceback of an error to this frame
