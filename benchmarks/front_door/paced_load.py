"""A client for `benchmarks/route.py`, in a separate process: many streams at once, and the arrival time of each token.

Each JSON line on standard input is one run: the fields of load.py, "step_s" of the workers, "ramp_s" in which the first
requests are sent, and for a run without a router the "prefill_port" to which each request is sent first. The workers
send the first token of a stream at once and the others at multiples of `step_s` of the clock: how much later
a token comes is its lag.
"""

import heapq
import math
import selectors
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.front_door.load import RUN_S, Call, Run
from benchmarks.kv.control import serve_stdin


class Client:
    """Sends request after request: to the prefill worker first if there is no router, then to the server."""

    def __init__(self, runs: list[Run], ports: list[int], figures: "Figures") -> None:
        self.calls = [Call(port, run) for port, run in zip(ports, runs, strict=True)]
        self._figures = figures
        self._at = 0

    def send(self) -> None:
        """Start the next request."""
        self._at, self._began = 0, time.perf_counter()
        self.calls[0].send()

    def receive(self, call: Call) -> bool:
        """Read what has arrived for `call`; return whether the request is answered."""
        if not call.receive():
            return False
        self._at += 1
        if self._at < len(self.calls):
            self.calls[self._at].send()
            return False
        if call.arrivals_s:  # else it failed, which `run` reports
            self._figures.add(self._began, call.arrivals_s)
        return True

    def close(self, selector: selectors.BaseSelector) -> None:
        """Close its connections."""
        for call in self.calls:
            selector.unregister(call.socket)
            call.socket.close()


class Figures:
    """Collects first-token times and token lags. Tokens are due one step apart, from the earliest."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._first_s: list[float] = []
        self._lags: list[tuple[float, float]] = []  # (arrival, lag)
        self._ends: list[tuple[float, float]] = []

    def add(self, began_s: float, arrivals_s: list[float]) -> None:
        """Add an answered request."""
        self._first_s.append(arrivals_s[0] - began_s)
        paced, step = arrivals_s[1:], self._step_s
        if paced:
            base = math.floor(min(when / step - number for number, when in enumerate(paced)))
            self._lags += [(when, when - (base + number) * step) for number, when in enumerate(paced)]
            self._ends.append((paced[0], paced[-1]))

    def report(self) -> dict[str, float]:
        """Return milliseconds: first tokens, lags, and lags in the first and the last quarter of the full load."""
        found = _percentiles("first", self._first_s) | _percentiles("token", [lag for _, lag in self._lags])
        begin, end = max(first for first, _ in self._ends), min(last for _, last in self._ends)
        quarter = (end - begin) / 4
        early = [lag for when, lag in self._lags if begin <= when <= begin + quarter]
        late = [lag for when, lag in self._lags if end - quarter <= when <= end]
        return found | (_percentiles("early", early) | _percentiles("late", late) if early and late else {})


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Send all requests and return the figures. Raises TimeoutError after two minutes."""
    ports, runs, figures = [int(spec["port"])], [Run(spec)], Figures(spec["step_s"])
    if spec.get("prefill_port"):
        ports.insert(0, spec["prefill_port"])
        runs.insert(0, Run({**spec, "max_tokens": 1, "least_tokens": 1, "stream": False}))
    count, began = min(spec["concurrency"], spec["requests"]), time.perf_counter()
    left = int(spec["requests"]) - count
    starts = [(began + number * spec.get("ramp_s", 0.0) / count, number) for number in range(count)]
    clients = [Client(runs, ports, figures) for _ in range(count)]
    with selectors.DefaultSelector() as selector:
        for client in clients:
            for call in client.calls:
                selector.register(call.socket, selectors.EVENT_READ, (client, call))
        busy = count
        while busy:
            now = time.perf_counter()
            if now - began > RUN_S:
                raise TimeoutError(f"requests without an answer after {RUN_S:g} s: {busy}")
            while starts and starts[0][0] <= now:
                clients[heapq.heappop(starts)[1]].send()
            for key, _ in selector.select(max(0.0, starts[0][0] - now) if starts else 1.0):
                client, call = key.data
                if not client.receive(call):
                    continue
                if left:
                    left -= 1
                    client.send()
                else:  # the server would close an idle connection while others are still answered
                    busy -= 1
                    client.close(selector)
    failures = [failure for one in runs for failure in one.failures]
    shown = {"failures": len(failures), "failure": failures[0] if failures else ""}
    return {"seconds": time.perf_counter() - began, "events": runs[-1].num_events, **shown, **figures.report()}


def _percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        f"{name}_p{percent}_ms": 1000 * ordered[min(len(ordered) - 1, percent * len(ordered) // 100)]
        for percent in (50, 99)
        if ordered
    }


if __name__ == "__main__":
    serve_stdin(run)
