"""Wait for a device's work with a deadline, which the device's own waits do not have."""

import time
from collections.abc import Callable

_FIRST_S, _LAST_S = 20e-6, 500e-6


def wait_until(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Poll `is_done` at growing intervals; return whether it was true within `timeout_s`."""
    deadline, pause = time.monotonic() + timeout_s, _FIRST_S
    while not is_done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LAST_S)
    return True
