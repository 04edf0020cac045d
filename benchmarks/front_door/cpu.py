"""CPU time of a process, with nanosecond resolution, and the round trips of requests to it."""

import http.client
import time
from pathlib import Path


def cpu_by_thread(pid: int) -> dict[str, float]:
    """Return the seconds that the process's living threads have run, as counted by the kernel's scheduler.

    `loop` is its first thread, which runs our event loop; the others are summed by thread name.
    """
    seconds: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name = "loop" if task.name == str(pid) else (task / "comm").read_text().strip()
            run_s = int((task / "schedstat").read_text().split()[0]) / 1e9
        except FileNotFoundError:
            continue  # the thread has ended
        seconds[name] = seconds.get(name, 0.0) + run_s
    return seconds


def cpu_s(pid: int) -> float:
    """Return the seconds that all threads of the process have run."""
    return sum(cpu_by_thread(pid).values())


def idle_cpu(pid: int, seconds: float) -> float:
    """Return the CPU seconds that the process uses per second while it gets no requests."""
    before = cpu_s(pid)
    time.sleep(seconds)
    return (cpu_s(pid) - before) / seconds


class Pings:
    """Sends GET /health repeatedly on one kept connection; the longest waits are the event loop's lag."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self.round_trips_s: list[float] = []

    def ping(self) -> None:
        """Send one request and record its time."""
        began = time.perf_counter()
        self._connection.request("GET", "/health")
        self._connection.getresponse().read()
        self.round_trips_s.append(time.perf_counter() - began)

    def p99_ms(self) -> float:
        """Return the 99th percentile of the round trips."""
        ordered = sorted(self.round_trips_s)
        return 1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
