"""A cheap client for `benchmarks/frontdoor.py`, in a separate process: raw sockets, no parser, kept connections.

Each JSON line on standard input is one run, {"port", "path", "model", "concurrency", "requests", "prompt_words",
"max_tokens", "stream", "api_key"}; with "least_tokens" each request's max_tokens is random, from that to "max_tokens".
The answer has the run's wall time, number of SSE events, statuses other than 200, and times to the first byte.
"""

import json
import random
import selectors
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kv.control import serve_stdin

WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many"
)  # one token each in any English vocabulary
RUN_S = 120.0
_EVENT = b"data: {"


class Call:
    """One connection that sends request after request and records the answers; `arrivals_s` has the times of
    the last answer's events.
    """

    def __init__(self, port: int, run: "Run") -> None:
        self._run = run
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=RUN_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self) -> None:
        """Send the next request."""
        self._head, self._tail, self._left, self._chunked = b"", b"", 0, False
        self._is_answered = False
        self.arrivals_s: list[float] = []
        self._sent_at = time.perf_counter()
        self.socket.sendall(self._run.request())

    def receive(self) -> bool:
        """Read what has arrived; return whether the answer is complete."""
        content = self.socket.recv(262_144)
        if not content:
            raise ConnectionError(f"the server closed the connection: {self._head[:200]!r}")
        if not self._is_answered:
            self._is_answered = True
            self._run.first_bytes_s.append(time.perf_counter() - self._sent_at)
            return self._begin(content)
        return self._go_on(content)

    def _begin(self, content: bytes) -> bool:
        head, found, rest = content.partition(b"\r\n\r\n")
        assert found, f"incomplete headers: {content[:200]!r}"
        self._head = head.lower()
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            self._run.failures.append(content[:300].decode(errors="replace"))
        self._chunked = b"transfer-encoding: chunked" in self._head
        if not self._chunked:
            self._left = int(self._head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        return self._go_on(rest)

    def _go_on(self, content: bytes) -> bool:
        if not self._chunked:
            self._left -= len(content)
            return self._left <= 0
        seen = self._tail + content
        count = seen.count(_EVENT)
        self._run.num_events += count
        self.arrivals_s += [time.perf_counter()] * count
        self._tail = seen[-(len(_EVENT) - 1) :]
        return seen.endswith(b"\r\n0\r\n\r\n") or seen == b"0\r\n\r\n"


class Run:
    """The specification of one run and its results."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.first_bytes_s: list[float] = []
        self.failures: list[str] = []
        self.num_events = 0
        self._rng = random.Random(spec.get("seed", 1))

    def request(self) -> bytes:
        """Return the bytes of one request with a new random prompt."""
        spec = self.spec
        prompt = " " + " ".join(self._rng.choices(WORDS.split(), k=spec["prompt_words"]))
        longest = spec["max_tokens"]
        max_tokens = self._rng.randint(spec.get("least_tokens", longest), longest)
        body = {
            "model": spec["model"], "prompt": prompt, "max_tokens": max_tokens, "stream": spec["stream"],
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        content = json.dumps(body).encode()
        key = f"Authorization: Bearer {spec['api_key']}\r\n" if spec.get("api_key") else ""
        head = (
            f"POST {spec['path']} HTTP/1.1\r\nHost: 127.0.0.1\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Send all requests and return the figures. Raises TimeoutError after two minutes."""
    made, left = Run(spec), int(spec["requests"])
    calls = [Call(spec["port"], made) for _ in range(min(spec["concurrency"], left))]
    began = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for call in calls:
            selector.register(call.socket, selectors.EVENT_READ, call)
            call.send()
            left -= 1
        busy = len(calls)
        while busy:
            if time.perf_counter() - began > RUN_S:
                raise TimeoutError(f"requests without an answer after {RUN_S:g} s: {busy}")
            for key, _ in selector.select(1.0):
                if not key.data.receive():
                    continue
                if left:
                    left -= 1
                    key.data.send()
                else:
                    busy -= 1
    for call in calls:
        call.socket.close()
    return {
        "seconds": time.perf_counter() - began,
        "events": made.num_events,
        "failures": len(made.failures),
        "failure": made.failures[0] if made.failures else "",
        "first_byte_ms": 1000 * statistics.median(made.first_bytes_s),
    }


if __name__ == "__main__":
    serve_stdin(run)
