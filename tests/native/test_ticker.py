"""Both tickers count the time that their process was kept from running, and never more than passed."""

import contextlib
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from native.builder import build_library
from native.cache import NoNative
from native.ticker import INTERVAL_S, RECIPE, Counters, NativeTicker, PythonTicker, Ticker

_STOPPED_S = 3.0
_WAIT_S = 300.0
_CHILD_INTERVAL_S = 0.01
_CHILD = """
import itertools, sys, time
from tests.native.test_ticker import start
ticker = start(sys.argv[1], float(sys.argv[2]))
began, before = time.monotonic(), ticker.starved_s()
print("ticks", flush=True)
sys.stdin.readline()
at_once = ticker.starved_s() - before
seen, until = [ticker.starved_s()], time.monotonic() + 1.5
while time.monotonic() < until:
    seen.append(ticker.starved_s())
print(time.monotonic() - began, at_once, ticker.starved_s() - before, flush=True)
print(max(one - two for one, two in itertools.pairwise(seen)), flush=True)
ticker.stop()
"""


def start(kind: str, interval_s: float = INTERVAL_S) -> Ticker:
    """Return a ticker of this kind; skip where it cannot be built."""
    if kind == "python":
        return PythonTicker(interval_s)
    try:
        return build_library(RECIPE, os.environ).start(interval_s)
    except NoNative as error:
        pytest.skip(f"missing tool: no native functions here: {error}")


@pytest.mark.parametrize("kind", ["native", pytest.param("python", marks=pytest.mark.long)])
def test_a_stopped_process_counts_its_stop_as_starved(kind: str) -> None:
    start(kind).stop()  # builds the library, so that the child does not
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, kind, str(_CHILD_INTERVAL_S)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ticks\n"
        child.send_signal(signal.SIGSTOP)
        time.sleep(_STOPPED_S)
        child.stdin.write("go on\n")
        child.stdin.flush()
        child.send_signal(signal.SIGCONT)
        passed_s, at_once_s, starved_s = map(float, child.stdout.readline().split())
        fewer_s = float(child.stdout.readline())
        assert child.wait(_WAIT_S) == 0

    least_s = _STOPPED_S - 4 * INTERVAL_S
    assert least_s <= at_once_s <= passed_s, "also before the late tick has run"
    assert least_s <= starved_s <= passed_s
    assert fewer_s <= 2 * _CHILD_INTERVAL_S, "a reader that comes before the tick counts at most this much more"


class _LateTick:
    """Counters of a thread that ticks five seconds late, between a reader's first and second read."""

    def __init__(self) -> None:
        self.now, self._looks = time.monotonic_ns(), 0

    def __getattr__(self, name: str) -> int:
        self._looks += 1
        last, starved = (self.now - 5 * 10**9, 0) if self._looks == 1 else (self.now, 475 * 10**7)
        return {"last_tick_ns": last, "run_ns": last - starved, "starved_ns": starved}[name]


def test_a_tick_between_two_reads_counts_once() -> None:
    counters = _LateTick()
    pointer = cast("ctypes._Pointer[Counters]", SimpleNamespace(contents=counters))

    starved_s = NativeTicker(pointer, lambda counters: None, INTERVAL_S).starved_s()

    assert 4.75 <= starved_s <= 5.0 + (time.monotonic_ns() - counters.now) / 1e9


def test_a_thread_that_waits_for_a_core_is_starved() -> None:
    ticker = start("native")
    assert isinstance(ticker, NativeTicker)
    core = min(os.sched_getaffinity(0))
    others = [
        subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"])
        for _ in range(3)
    ]
    before_cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {core})
        began, before, deadline = time.monotonic(), ticker.starved_s(), time.monotonic() + _WAIT_S
        while ticker.starved_s() - before < 1.0 and time.monotonic() < deadline:
            pass
        starved_s, passed_s = ticker.starved_s() - before, time.monotonic() - began
    finally:
        os.sched_setaffinity(0, before_cores)
        for other in others:
            other.kill()
            other.wait()
        ticker.stop()

    assert 1.0 <= starved_s <= passed_s + 2.0, "a read covers the second before it"


def test_native_ticks_need_no_gil() -> None:
    ticker = start("native")
    assert isinstance(ticker, NativeTicker)
    before, before_interval = ticker.num_ticks, sys.getswitchinterval()
    sys.setswitchinterval(_WAIT_S)
    try:
        deadline = time.monotonic() + _WAIT_S
        while ticker.num_ticks < before + 3 and time.monotonic() < deadline:
            pass
        assert ticker.num_ticks >= before + 3
    finally:
        sys.setswitchinterval(before_interval)
        ticker.stop()


class _Started(Exception):
    """Raised instead of starting a ticker."""


_PROCESSES: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "scheduler.process": (lambda module: module.run(None, None, SimpleNamespace(warn=lambda: None)), ()),
    "instance.process": (lambda module: module.run(SimpleNamespace(cores=())), ()),
    "engine.ranks.process": (
        lambda module: module._run(None, SimpleNamespace(cores=(), num_threads=1), None, contextlib.ExitStack()),
        ("prepare_torch",),
    ),
    "pdserve.serve": (lambda module: module.main(["--engine", "fake", "--port", "0"]), ("run",)),
    "pdserve.bench.pd.colocated": (
        lambda module: module._serve(["127.0.0.1:1"], ["--model", "/m", "--served-model-name", "m"]),
        ("die_with_parent", "run"),
    ),
    "kvtransfer.process_group.child": (
        lambda module: module.main(["-1", "0"]), ("socket", "Channel", "end_with", "signal"),
    ),
}  # fmt: skip
"""The processes whose limits count the time in which they could run: how each starts, and what this test leaves out."""


@pytest.mark.parametrize("module_name", _PROCESSES)
def test_every_process_starts_its_ticker_before_it_serves(module_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def started() -> Ticker:
        raise _Started

    module, (start_process, left_out) = importlib.import_module(module_name), _PROCESSES[module_name]
    monkeypatch.setattr(module, "start_ticker", started)
    for name in left_out:
        monkeypatch.setattr(module, name, MagicMock())

    with pytest.raises(_Started):
        start_process(module)
