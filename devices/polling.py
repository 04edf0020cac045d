"""Wait for a device's work with a deadline, which the device's own waits do not have."""

import time
from collections.abc import Callable

from native.ticker import run_time

_FIRST_S, _LAST_S = 20e-6, 500e-6


def wait_until(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Poll `is_done` at growing intervals; return whether it became true in time.

    `timeout_s` does not include time in which the machine kept this process from running.
    """
    deadline, pause = run_time() + timeout_s, _FIRST_S
    while not is_done():
        left = deadline - run_time()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LAST_S)
    return True
