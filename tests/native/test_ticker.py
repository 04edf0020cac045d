"""Both tickers count the time in which their process was kept from running, and no more than passed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from native.builder import build_library
from native.cache import NoNative
from native.ticker import INTERVAL_S, RECIPE, NativeTicker, PythonTicker, Ticker

_STOPPED_S = 1.5
_WAIT_S = 60.0
_CHILD = """
import sys, time
from tests.native.test_ticker import start
ticker = start(sys.argv[1])
began, before = time.monotonic(), ticker.starved_s()
print("ticks", flush=True)
sys.stdin.readline()
at_once = ticker.starved_s() - before
time.sleep(1.5)
print(time.monotonic() - began, at_once, ticker.starved_s() - before, flush=True)
ticker.stop()
"""


def start(kind: str) -> Ticker:
    """Return a ticker of this kind; skip where it cannot be built."""
    if kind == "python":
        return PythonTicker()
    try:
        return build_library(RECIPE, os.environ).start()
    except NoNative as error:
        pytest.skip(f"missing tool: no native functions here: {error}")


@pytest.mark.parametrize("kind", ["native", "python"])
def test_a_stopped_process_counts_its_stop_as_starved(kind: str) -> None:
    start(kind).stop()  # the child does not build
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
        assert child.wait(_WAIT_S) == 0

    least_s = _STOPPED_S - 4 * INTERVAL_S
    assert least_s <= at_once_s <= passed_s, "also before the late tick has come"
    assert least_s <= starved_s <= passed_s


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

    assert 1.0 <= starved_s <= passed_s + 2.0, "a look covers the second before it"


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
