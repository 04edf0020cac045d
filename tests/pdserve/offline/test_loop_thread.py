"""An event loop in a thread: what it runs, how it ends, and what waiters get then."""

import asyncio
import concurrent.futures
import contextlib
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import wait as wait_for
from typing import Any

import pytest

from pdserve.offline.loop_thread import LoopThread
from wire.errors import ConfigError, InstanceLost, Unavailable

WAIT_S = 300.0


class Place:
    """A resource that records whether it was opened and closed."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.lost = asyncio.Event()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Place"]:
        self.events.append("open")
        owner = asyncio.current_task()
        assert owner is not None
        losing = asyncio.create_task(self._mark_lost(owner))
        try:
            yield self
        except asyncio.CancelledError:
            if self.lost.is_set():
                owner.uncancel()
                raise InstanceLost("the engine died") from None
            raise
        finally:
            losing.cancel()
            self.events.append("closed")

    async def _mark_lost(self, owner: "asyncio.Task[object]") -> None:
        await self.lost.wait()
        owner.cancel()


async def number() -> int:
    return 7


async def fail() -> None:
    raise ConfigError("in words")


async def wait(begun: threading.Event, place: Place) -> None:
    begun.set()
    try:
        await asyncio.Event().wait()
    finally:
        place.events.append("cancelled")


def test_it_returns_and_raises_what_the_work_does_until_closed() -> None:
    place = Place()
    thread = LoopThread(place.open)

    assert thread.value is place
    assert thread.run(number()) == 7
    with pytest.raises(ConfigError, match="in words"):
        thread.run(fail())
    thread.close()
    thread.close()
    assert place.events == ["open", "closed"]
    with pytest.raises(Unavailable, match="this LLM is closed"):
        thread.run(number())


def test_a_failure_to_open_is_raised_and_leaves_no_thread() -> None:
    @contextlib.asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        raise ConfigError("no such model")
        yield

    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="no such model"):
        LoopThread(broken)

    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("end", ["close", "loss"])
def test_a_waiter_gets_the_closing_error_between_cancel_and_close(end: str) -> None:
    place, begun, errors = Place(), threading.Event(), []
    thread = LoopThread(place.open)

    def ask() -> None:
        try:
            thread.run(wait(begun, place))
        except Unavailable as error:
            errors.append(str(error))

    caller = threading.Thread(target=ask)
    caller.start()
    assert begun.wait(WAIT_S)
    if end == "close":
        thread.close()
    else:
        thread.run(_mark_lost(place))
    caller.join(WAIT_S)

    assert place.events == ["open", "cancelled", "closed"]
    assert errors == ["this LLM was closed meanwhile" if end == "close" else "the engine died"]


async def _mark_lost(place: Place) -> None:
    place.lost.set()


def test_an_interrupt_cancels_only_the_awaited_work(monkeypatch: pytest.MonkeyPatch) -> None:
    place, begun = Place(), threading.Event()
    thread = LoopThread(place.open)
    interrupt = _Interrupt(begun)
    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.Future.result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            thread.run(wait(begun, place))

    assert place.events == ["open", "cancelled"]
    assert thread.run(number()) == 7
    thread.close()


def all_end(futures: list[concurrent.futures.Future[Any]], timeout: float) -> None:
    """Wait as `concurrent.futures.wait` does, but raise at the time limit."""
    assert wait_for(futures, timeout).not_done == set()


@pytest.mark.parametrize("is_handed_over", [True, False])
def test_an_interrupt_at_submission_leaves_no_work(is_handed_over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place()
    thread = LoopThread(place.open)
    hand_over, work = thread._loop.call_soon_threadsafe, wait(threading.Event(), place)

    def interrupted(*reported: Any) -> None:
        monkeypatch.undo()
        if is_handed_over:
            hand_over(*reported)
        raise KeyboardInterrupt

    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", interrupted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(concurrent.futures, "wait", all_end)
        with pytest.raises(KeyboardInterrupt):
            thread.run(work)

    assert thread.run(number()) == 7
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED
    thread.close()


class _Interrupt:
    """Ctrl-C while a result is waited for, once the work has begun."""

    def __init__(self, begun: threading.Event) -> None:
        self._begun = begun

    def __call__(self, timeout: float | None = None) -> None:
        assert self._begun.wait(WAIT_S)
        raise KeyboardInterrupt


_UNCLOSED = """
import asyncio, atexit, contextlib
from pdserve.offline.loop_thread import LoopThread

@contextlib.asynccontextmanager
async def place():
    yield
    print(await asyncio.to_thread(lambda: "its threads ended"))
    print("closed")

thread = LoopThread(place)
thread.run(asyncio.to_thread(print, "asked"))
atexit.register(thread.close)
"""


def test_open_resources_are_closed_at_interpreter_exit() -> None:
    ended = subprocess.run([sys.executable, "-c", _UNCLOSED], capture_output=True, text=True, timeout=2 * WAIT_S)

    assert (ended.stdout.split("\n"), ended.stderr) == (["asked", "its threads ended", "closed", ""], "")


class _SlowToClose(asyncio.SelectorEventLoop):
    """A loop that runs one more callback after its last turn."""

    def __init__(self) -> None:
        super().__init__()
        self.closing, self.reported = threading.Event(), threading.Event()

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:  # type: ignore[override]
        handle = super().call_soon_threadsafe(*args, **kwargs)
        if self.closing.is_set():
            self.reported.set()
        return handle

    def close(self) -> None:
        if not self.is_closed():
            self.closing.set()
            assert self.reported.wait(WAIT_S)
        super().close()


def test_work_after_the_loops_last_iteration_gets_the_closed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = _SlowToClose()
    monkeypatch.setattr("pdserve.offline.loop_thread.new_loop", lambda: loop)
    thread = LoopThread(Place().open)
    closer = threading.Thread(target=thread.close)
    closer.start()
    assert loop.closing.wait(WAIT_S)

    with pytest.raises(Unavailable, match="this LLM is closed"):
        thread.run(number())
    closer.join(WAIT_S)


def test_a_forked_child_gets_an_error_and_exits_harmlessly() -> None:
    place = Place()
    thread = LoopThread(place.open)
    ours, theirs = os.pipe()

    pid = os.fork()
    if pid == 0:
        try:
            thread.run(number())
        except BaseException as error:
            os.write(theirs, f"{type(error).__name__}: {error}".encode())
        thread.close()
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(theirs)
    with open(ours, encoding="utf-8") as pipe:
        output = pipe.read()

    assert output == (
        f"ConfigError: this LLM was created by process {os.getpid()}, but this is {pid}, a fork without its threads: "
        "create an LLM after the fork"
    )
    assert thread.run(number()) == 7
    thread.close()
    assert place.events == ["open", "closed"]
