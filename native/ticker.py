"""Measure how long the machine kept this process from running (ticker.c): no liveness or progress limit counts it.

    silence = time passed - time starved of the observing process: a starved observer blames no peer

Call `start_ticker` in a process's entry point; `starved_s` is 0 in a process without a ticker.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from native.builder import find_library
from native.cache import NoNative
from native.recipe import Recipe

INTERVAL_S = 0.1
_NS = 1_000_000_000
_MIN_RUN_SHARE = 20  # as in ticker.c


class Ticker(Protocol):
    """A running ticker."""

    name: str

    def starved_s(self) -> float:
        """Return the seconds starved since its start, including those of a tick that is late now."""
        ...

    def stop(self) -> None:
        """End its thread; no other call may follow."""
        ...


class Counters(ctypes.Structure):
    """struct counters of native/ticker.c, written by the native thread."""

    _fields_ = (
        ("num_bytes", ctypes.c_int64), ("run_ns", ctypes.c_int64), ("starved_ns", ctypes.c_int64),
        ("num_ticks", ctypes.c_int64),
    )  # fmt: skip


class TickerLibrary:
    """The opened library."""

    def __init__(self, path: Path) -> None:
        """Load a built library. Raises OSError, AttributeError."""
        library = ctypes.CDLL(str(path))
        self._start, self._stop = library.native_ticker_start, library.native_ticker_stop
        self._start.argtypes, self._start.restype = (ctypes.c_int64,), ctypes.POINTER(Counters)
        self._stop.argtypes, self._stop.restype = (ctypes.POINTER(Counters),), None

    def start(self, interval_s: float = INTERVAL_S) -> "NativeTicker":
        """Start a ticker. Raises NoNative if it gets no thread or the library was built from other sources."""
        counters = self._start(int(interval_s * _NS))
        if not counters or counters.contents.num_bytes != ctypes.sizeof(Counters):
            raise NoNative("the native ticker cannot be started")
        return NativeTicker(counters, self._stop, interval_s)


class NativeTicker:
    """Implements Ticker with the native thread, which needs no GIL."""

    name = "native"

    def __init__(self, counters: "ctypes._Pointer[Counters]", stop: Callable[..., None], interval_s: float) -> None:
        self._pointer, self._counters, self._stop = counters, counters.contents, stop
        self._late_after_ns = int(2 * interval_s * _NS)

    @property
    def num_ticks(self) -> int:
        """Ticks so far."""
        return int(self._counters.num_ticks)

    def starved_s(self) -> float:
        """See Ticker."""
        starved = now = run = -1
        while starved != self._counters.starved_ns:  # a tick came between the reads: its time would count twice
            starved, now, run = self._counters.starved_ns, time.monotonic_ns(), self._counters.run_ns
        passed = now - run - starved  # since the last tick
        late = min(passed - self._late_after_ns, passed - passed // _MIN_RUN_SHARE)
        return float(starved + max(0, late)) / _NS

    def stop(self) -> None:
        """See Ticker."""
        self._stop(self._pointer)


class PythonTicker:
    """Implements Ticker with a Python thread, which also counts time in which other threads held the GIL."""

    name = "python"

    def __init__(self, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s, self._clock = interval_s, clock
        self._last_tick, self._starved = clock(), 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
        self._thread.start()

    def starved_s(self) -> float:
        """See Ticker."""
        last, starved = self._last_tick, self._starved
        return starved + max(0.0, self._clock() - last - 2 * self._interval_s)

    def stop(self) -> None:
        """See Ticker."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            now = self._clock()
            late = now - self._last_tick - self._interval_s
            if late > self._interval_s:
                self._starved += late
            self._last_tick = now


_ticker: Ticker | None = None


def start_ticker() -> Ticker:
    """Return this process's ticker, started at the first call: the native one if it is built, else Python's."""
    global _ticker
    if _ticker is None:
        library = find_library(RECIPE, os.environ).library
        _ticker = PythonTicker() if library is None else library.start()
    return _ticker


def starved_s() -> float:
    """Return the seconds in which this process was kept from running since its ticker started; 0 without one."""
    return 0.0 if _ticker is None else _ticker.starved_s()


def run_time(clock: Callable[[], float] = time.monotonic, starved: Callable[[], float] = starved_s) -> float:
    """Return `clock` minus the time starved: a difference of two is the time in which this process could run."""
    return clock() - starved()


def _checked(path: Path) -> TickerLibrary:
    """Load a library and start a ticker once. Raises NoNative."""
    try:
        library = TickerLibrary(path)
    except (OSError, AttributeError) as error:
        raise NoNative(f"{path} cannot be loaded: {error}") from error
    library.start().stop()
    return library


RECIPE = Recipe("ticker", ("ticker.c",), _checked)
