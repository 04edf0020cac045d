"""The containers that repeat something end on a signal, whenever it comes."""

import subprocess
import sys

# The handler runs between any two lines: also while the wait acquires and releases its locks, and once more
# within itself.
_AT_EVERY_LINE = """
import signal, sys
from ranktable_tools.kube.retry_loop import repeat, until_signal

def trace(frame, event, argument):
    if event == "line" and frame.f_code.co_name == "wait":
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    return trace

stop = until_signal()
sys.settrace(trace)
repeat(lambda: ["a turn"], stop, 600.0, print)
print("ended")
"""


def test_a_signal_ends_it_at_any_line_of_its_wait() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", _AT_EVERY_LINE], capture_output=True, text=True, timeout=300)

    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "ended"), done.stderr


_WAITING = """
import os, signal, threading
from ranktable_tools.kube.retry_loop import repeat, until_signal

def interrupt():
    os.kill(os.getpid(), signal.SIGTERM)

turns = []
def turn():
    turns.append(None)
    threading.Thread(target=interrupt).start()
    return []

repeat(turn, until_signal(), 600.0, print)
print(len(turns), "turn")
"""


def test_a_signal_ends_a_long_wait() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", _WAITING], capture_output=True, text=True, timeout=300)

    assert (done.returncode, done.stdout) == (0, "1 turn\n"), done.stderr
