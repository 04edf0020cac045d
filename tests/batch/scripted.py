"""Inputs and a backend for tests: it echoes, or follows its script, and records its requests."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from batch.backend import NO_HEADERS, Answer
from batch.job import BatchJob, RetryPolicy
from batch.prepared_job import prepare
from batch.runner import BatchProgress, run_batch

NUM_LINES = 30
CHAT = "/v1/chat/completions"
AT_ONCE = RetryPolicy(attempts=3, busy_attempts=5, first_delay_s=0.0, max_delay_s=0.0, max_retry_after_s=0.0)

Script = Callable[[Any, int], Answer | Exception]
"""The answer to a body's `n` at its given attempt, counted from 0."""


def line(n: Any, **changes: Any) -> dict[str, Any]:
    """Return the object of a line whose body has this `n`."""
    own = {"custom_id": f"request-{n}", "method": "POST", "url": CHAT, "body": {"model": "m", "n": n}}
    return own | changes


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    """Write an input."""
    with path.open("w") as file:
        file.writelines(json.dumps(one) + "\n" for one in lines)
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read an output."""
    return [json.loads(one) for one in path.read_text().splitlines()]


def plain(path: Path) -> list[dict[str, Any]]:
    """Read an output without what differs from run to run."""
    lines = read_lines(path)
    for one in lines:
        del one["id"], one["response"]["request_id"]
    return lines


def json_answer(body: Any, status: int = 200, **headers: str) -> Answer:
    """Return a JSON answer."""
    return Answer(status, {name.replace("_", "-"): value for name, value in headers.items()}, json.dumps(body).encode())


def echo(n: Any, times: int = 1) -> Answer:
    """Return an answer that depends on `n` alone."""
    return json_answer({"echo": n, "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}})


def ignore(progress: BatchProgress) -> None:
    """Do nothing with it."""


class Scripted:
    """A BatchBackend. `probe` is the status of /health and /ready, or an error if the server is gone."""

    def __init__(self, script: Script = echo, *, probe: int | Exception = 200) -> None:
        self.requests: Counter[Any] = Counter()
        self.paths: list[str] = []
        self.headers: list[Mapping[str, str]] = []
        self.now = self.peak = self.cancelled = 0
        self.hold: asyncio.Event | None = None
        self.holding = asyncio.Event()
        self._script = script
        self._probe = probe

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> Answer:  # fmt: skip
        """Answer by the script; with `hold`, once that is set."""
        if method == "GET":
            if isinstance(self._probe, Exception):
                raise self._probe
            return Answer(self._probe, {}, b"")
        n = json.loads(body)["n"]
        self.requests[n] += 1
        self.paths.append(path)
        self.headers.append(headers)
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            await self._wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.now -= 1
        answer = self._script(n, self.requests[n])
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _wait(self) -> None:
        self.holding.set()
        await asyncio.sleep(0)
        if self.hold is not None:
            await self.hold.wait()


async def run_job(job: BatchJob, backend: Scripted) -> BatchProgress:
    """Run a job to its end."""
    with prepare(job) as prepared:
        return await run_batch(prepared, backend, on_progress=ignore)
