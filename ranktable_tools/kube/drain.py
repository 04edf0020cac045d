"""Wait until a pod's instance has no work before it is stopped, so that no request is aborted.

The writer sees that the pod is terminating and removes it from the table; the scheduler then sends it no new work.
"""

import http.client
import re
import time
from collections.abc import Callable

_BUSY = re.compile(r"^pdserve_instance_(?:running|waiting|held_prompts) ([0-9.e+]+)$", re.MULTILINE)
_POLL_S = 0.5
_TIMEOUT_S = 2.0


def drain(
    host: str,
    port: int,
    *,
    settle_s: float,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Return a log line once the instance with this --http-port has no work or is gone, or at the time limit.

    It waits at least `settle_s`, the time the scheduler may need to see the table without this pod.
    """
    began = clock()
    while True:
        spent, work = clock() - began, _num_prompts(host, port)
        if work is None:
            return f"the instance has exited, after {spent:.0f} s"
        if spent >= settle_s and work == 0:
            return f"no work is left, after {spent:.0f} s"
        if spent >= timeout_s:
            return f"prompts left after {timeout_s:g} s: {work}; they end with the process, or continue elsewhere"
        sleep(_POLL_S)


def _num_prompts(host: str, port: int) -> int | None:
    """Return the number of prompts in the instance, None if nothing listens there any more."""
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    except ConnectionRefusedError:
        return None
    except (OSError, http.client.HTTPException):
        return 1  # assume that it is busy, as for a response without these metrics
    finally:
        connection.close()
    figures = [float(value) for value in _BUSY.findall(text)]
    return int(sum(figures)) if figures else 1
