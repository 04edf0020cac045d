"""Find and kill what the ended processes of a cluster left running: vLLM's engine survives a server that was killed."""

import os
import time
from collections.abc import Sequence

from pdserve.descendants import end_process, read_processes, wait_end
from pdserve.run_folder import ProcessRecord

_WAIT_S = 10.0


def end_leftovers(processes: Sequence[ProcessRecord]) -> str:
    """Kill what these processes left running, and return a line that names their owners, "" if nothing was left.

    A leftover process is in the session that its server led, and writes to its server's log. The log is checked too,
    because a session's number is reused once all its processes have ended.
    """
    deadline, left = time.monotonic() + _WAIT_S, list[str]()
    ended = [one for one in processes if one.is_here and not one.alive]
    for pid, place in read_processes().items():
        owner = next((one for one in ended if one.pid == place.session and _writes_to(pid, one.log)), None)
        pidfd = None if owner is None else end_process(pid, place.started)
        if owner is not None and pidfd is not None:
            left.append(owner.name)
            wait_end(pidfd, deadline)
            os.close(pidfd)
    return f"stopped leftover processes of {', '.join(dict.fromkeys(left))}" if left else ""


def _writes_to(pid: int, log: str) -> bool:
    try:
        file = os.stat(log)
        return any(os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), file) for number in (1, 2))
    except OSError:
        return False
