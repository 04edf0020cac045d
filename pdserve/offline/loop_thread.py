"""An event loop in a separate thread, with a resource that stays open while it runs.

start -> open ... run, run, run ... close or failure -> runs are cancelled -> closed -> the thread ends
"""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from scheduler.loop import new_loop
from wire.errors import ConfigError, Unavailable

T = TypeVar("T")
R = TypeVar("R")
_CANCEL_S = 30.0
_POLL_S = 1.0  # how often a waiting caller checks that the thread still lives


class LoopThread(Generic[T]):
    """Owns the thread. Any other thread may call `run`; Ctrl-C cancels only the work of that call."""

    def __init__(self, open_: Callable[[], AbstractAsyncContextManager[T]], *, close_s: float = 60.0) -> None:
        """Start the thread and return when `open_` is entered. Raises the exceptions of `open_`.

        `close_s`: how long closing may take.
        """
        self._open = open_
        self._close_s = close_s
        self._runs: set[_Run[Any]] = set()
        self._failure: BaseException | None = None
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._value: T | None = None
        self._loop = new_loop()
        self._stop = asyncio.Event()
        self._holding: asyncio.Task[None] | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._main, name="pdserve-offline", daemon=True)
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:
            self.close()
            raise

    @property
    def value(self) -> T:
        """The open resource. Raises the error that ended the loop, Unavailable once this is closed."""
        value = self._value
        if value is None:
            self._thread.join(self._close_s)
            raise self._failure or Unavailable("this LLM is closed")
        return value

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run `work` and return its result. Raises its exceptions, and the error that ended the loop meanwhile.

        Raises ConfigError in a fork of the process that created this object: a fork lacks its threads.
        """
        if self._is_a_fork:
            work.close()
            raise ConfigError(
                f"this LLM was created by process {self._process}, but this is {os.getpid()}, a fork without its "
                "threads: create an LLM after the fork"
            )
        run = _Run(work, self._runs)
        try:
            self._hand_over(run)
            return self._result(run)
        except concurrent.futures.CancelledError:
            self._thread.join(self._close_s)
            raise self._failure or Unavailable("this LLM was closed meanwhile") from None
        except KeyboardInterrupt:
            self._call_soon(run.cancel)
            concurrent.futures.wait([run.future], _CANCEL_S)
            raise

    def _hand_over(self, run: "_Run[Any]") -> None:
        try:
            self._loop.call_soon_threadsafe(run.begin)
        except RuntimeError:
            run.drop()
            raise self._failure or Unavailable("this LLM is closed") from None

    def _result(self, run: "_Run[R]") -> R:
        """Wait for the result. Raises Unavailable if the loop ended before the work began."""
        while True:
            try:
                return run.future.result(_POLL_S)
            except TimeoutError:
                is_over = not self._thread.is_alive()
                if run.future.done():
                    return run.future.result()  # the work may have raised TimeoutError itself
                if is_over:
                    run.drop()
                    raise self._failure or Unavailable("this LLM is closed") from None

    def close(self) -> None:
        """Cancel running work, close the resource and end the thread. Idempotent; no effect in a fork."""
        if self._is_a_fork:
            return
        self._call_soon(self._end)
        if threading.current_thread() is not self._thread:  # the garbage collector may run on it
            self._thread.join(self._close_s)

    @property
    def _is_a_fork(self) -> bool:
        return os.getpid() != self._process

    def _call_soon(self, what: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is left to do
            self._loop.call_soon_threadsafe(what)

    def _end(self) -> None:
        self._stop.set()
        if self._holding is not None and not self._opened.done():
            self._holding.cancel()

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._run_until_stopped())
        except BaseException as error:  # noqa: BLE001 - the thread's outermost frame: raised in the waiting callers
            self._failure = None if isinstance(error, asyncio.CancelledError) else error
            if not self._opened.done():
                self._opened.set_exception(self._failure or Unavailable("this LLM was closed while it was opened"))
        finally:
            self._loop.close()

    async def _run_until_stopped(self) -> None:
        self._loop.set_default_executor(_Executor(thread_name_prefix="pdserve-offline"))
        self._holding = asyncio.current_task()
        if self._stop.is_set():
            raise asyncio.CancelledError
        async with self._open() as value:
            self._value = value
            self._opened.set_result(None)
            try:
                await self._stop.wait()
            finally:
                self._value = None  # release the app and the model even if this object lives on
                await self._end_runs()

    async def _end_runs(self) -> None:
        """Cancel all work before the resource is closed."""
        tasks = [run.task for run in self._runs if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Run(Generic[R]):
    """One piece of work and its future. Only `future` may be used outside the loop's thread."""

    def __init__(self, work: Coroutine[Any, Any, R], runs: "set[_Run[Any]]") -> None:
        self.future: concurrent.futures.Future[R] = concurrent.futures.Future()
        self.task: asyncio.Task[R] | None = None
        self._work, self._runs = work, runs

    def begin(self) -> None:
        """Start the work."""
        self._runs.add(self)
        self.task = asyncio.get_running_loop().create_task(self._work)
        self.task.add_done_callback(self._on_task_done)

    def drop(self) -> None:
        """Discard work that will never begin."""
        self._work.close()

    def cancel(self) -> None:
        """Cancel the work, also if Ctrl-C came before it was passed to the loop."""
        if self.task is not None:
            self.task.cancel()
        elif self.future.cancel():
            self.future.set_running_or_notify_cancel()  # wakes the caller, which waits for the end
            self.drop()

    def _on_task_done(self, task: asyncio.Task[R]) -> None:
        self._runs.discard(self)
        if task.cancelled():
            self.future.set_exception(concurrent.futures.CancelledError())
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


class _Executor(concurrent.futures.ThreadPoolExecutor):
    """A thread pool that runs work in the caller's thread at interpreter exit, when much remains to be closed."""

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[R]:
        """Run `fn` in a thread, or immediately."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:  # the interpreter is exiting
            future: concurrent.futures.Future[R] = concurrent.futures.Future()
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - as in a thread: raised by the future
                future.set_exception(error)
            return future
