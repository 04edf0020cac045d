"""One thread that issues every group operation of one device, in order: HCCL allows only one such thread."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")
_JOIN_S = 2.0


class IssueQueue:
    """Owner of the issuing thread. Submitted tasks must not wait for a peer longer than a bounded time."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, task: Callable[[], _T]) -> "Future[_T]":
        """Queue `task` without blocking; the future gets its result or exception."""
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(task())
            except BaseException as error:  # noqa: BLE001  the outermost frame of a task: passed to the future
                future.set_exception(error)

        self._tasks.put(run)
        return future

    def close(self) -> None:
        """End the thread after the queued tasks."""
        self._tasks.put(None)
        if threading.current_thread() is not self.thread:
            self.thread.join(_JOIN_S)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # a task refers to its group
