"""Faults of vLLM workers behind `pdserve route`: two P and two D doubles, each a process that dies, stops or hangs up.

Each row sends REQUESTS requests, half of them sampled; one of them meets the fault. Every one must end once, with the
answer of a run without faults or with an error, and the cluster must be whole again when the worker is.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx
import pytest

from pdserve.client import Client
from pdserve.ports import free_ports
from tests.engine.tiny_models import VOCAB_SIZE, save_tiny_tokenizer
from tests.faults.cases import ANSWER, CLOSED
from tests.faults.stream_request import StreamResult, request_stream
from wire.errors import Unavailable

pytestmark = pytest.mark.cluster

RESULTS = "WORKER_FAULT_RESULTS"
"""A file's name here gets a line of Markdown for each row."""
REQUESTS = 20
AT_ONCE = 5
LENGTH = 24
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
POINTS = {
    "P before its answer": ("prefill", "before", 0),
    "P has computed, its answer unfinished": ("prefill", "after", 0),
    "D before its answer": ("decode", "before", 0),
    "D after its first token": ("decode", "during", 1),
    "D in mid-stream": ("decode", "during", 12),
    "D after its last token": ("decode", "after", 0),
    "P while no request is on it": ("prefill", "idle", 0),
    "D while no request is on it": ("decode", "idle", 0),
}
ACTIONS = {"die": "killed", "stop": "stopped", "drop": "connection cut", "hang": "answers nothing", "error": "HTTP 500"}
ROWS = [(point, action) for point in POINTS for action in ACTIONS if action == "die" or "no request" not in point]
PUSH_ROWS = [(point, "die") for point in POINTS if "no request" not in point]
"""The rows that run with NixlPushConnector too."""
OFTEN = frozenset({("D in mid-stream", "die"), ("P has computed, its answer unfinished", "drop")})
"""The rows that run every time."""


class Processes:
    """The workers and the scheduler as processes; a worker that has died is started again on its port."""

    def __init__(self, folder: Path, model: Path, connector: str) -> None:
        self.ports = free_ports(5)
        self._connector = connector
        self._folder = folder
        self._model = model
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._scheduler: subprocess.Popen[bytes] | None = None
        self.client = Client(f"http://127.0.0.1:{self.ports[-1]}")

    def __enter__(self) -> Self:
        for name in NAMES:
            self.start(name)
        urls = [self.url(name) for name in NAMES]
        self._scheduler = self._spawn(
            "scheduler", "pdserve", "route", "--prefill", *urls[:2], "--decode", *urls[2:], "--model",
            str(self._model), "--served-model-name", "tiny", "--port", str(self.ports[-1]),
            "--connector", self._connector,
            "--run-dir", str(self._folder / "route"),
        )  # fmt: skip
        self.wait_whole()
        return self

    def __exit__(self, *exc: object) -> None:
        processes = [*self._workers.values(), *filter(None, [self._scheduler])]
        for process in processes:
            process.kill()
            process.wait(60)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[NAMES.index(name)]}"

    def start(self, name: str) -> None:
        """Start a worker."""
        fake = {"num_layers": 1, "vocab_size": VOCAB_SIZE, "step_seconds": 0.005}
        settings = json.dumps({"model": "tiny", "fake": fake, "connector": self._connector})
        port = str(self.ports[NAMES.index(name)])
        self._workers[name] = self._spawn(name, "testing.vllm_worker", "--port", port, "--settings", settings)

    def heal(self, name: str) -> None:
        """Let a stopped worker go on, and start one that has died again."""
        process = self._workers[name]
        process.send_signal(signal.SIGCONT)
        if process.poll() is not None:
            self.start(name)

    def kill(self, name: str) -> None:
        """End a worker at once."""
        self._workers[name].kill()
        self._workers[name].wait(60)

    def wait_whole(self) -> None:
        """Wait until every worker is living and every pair is proven."""
        deadline = time.monotonic() + 300.0
        while True:
            try:
                ready = self.client.get("/ready").json()
                if ready["ready"] and not ready["missing"]:
                    return
            except Unavailable:
                ready = None
            assert self._scheduler is None or self._scheduler.poll() is None, "the scheduler has ended"
            assert time.monotonic() < deadline, ready
            time.sleep(0.1)

    def counts(self) -> dict[str, float]:
        """Return how many requests ended in which way."""
        samples = self.client.metrics()
        return {
            one.name.removeprefix("pdserve_requests_").removesuffix("_total"): one.value
            for one in samples
            if one.name.startswith("pdserve_requests_") and not one.labels
        }

    def _spawn(self, name: str, module: str, *arguments: str) -> "subprocess.Popen[bytes]":
        root = str(Path(__file__).parents[2])
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": root},
            )  # fmt: skip


@dataclass
class Whole:
    """The processes, and the answers of a run without faults."""

    processes: Processes
    right: list[StreamResult]


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    """Two P, two D and a scheduler, with the connector of the row."""
    folder = tmp_path_factory.mktemp("workers")
    save_tiny_tokenizer(folder)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    with Processes(folder, folder, request.param) as processes:
        right = asyncio.run(_request_all(processes))
        assert [one.outcome for one in right] == [ANSWER] * REQUESTS, right
        yield Whole(processes, right)


async def _request_all(processes: Processes) -> list[StreamResult]:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> StreamResult:
        prompt = [5 + number, *range(20, 20 + 40 + number)]
        async with room:
            return await request_stream(client, prompt, LENGTH, temperature=0.8 if number % 2 else 0.0, seed=number)

    async with httpx.AsyncClient(base_url=processes.client.base_url, timeout=120.0) as client:
        return list(await asyncio.gather(*map(one, range(REQUESTS))))


@pytest.mark.parametrize(
    ("whole", "point", "action"),
    [
        *(pytest.param("nixl", *row, marks=() if row in OFTEN else pytest.mark.long, id=" ".join(row)) for row in ROWS),
        *(pytest.param("nixl-push", *row, marks=pytest.mark.long, id=f"push {' '.join(row)}") for row in PUSH_ROWS),
    ],
    indirect=["whole"],
)
def test_a_fault_of_a_worker_loses_no_request(whole: Whole, point: str, action: str) -> None:
    processes = whole.processes
    leg, when, after_tokens = POINTS[point]
    victim = f"{leg}-0"
    if when == "idle":
        processes.kill(victim)
    else:
        fault = {"action": action, "point": when, "leg": leg, "after_tokens": after_tokens}
        Client(processes.url(victim)).post("/testing/faults", fault)
    began = time.monotonic()
    results = asyncio.run(_request_all(processes))
    took_s = time.monotonic() - began
    processes.heal(victim)
    processes.wait_whole()

    answered = [one for one in results if one.outcome == ANSWER]
    wrong = [
        (one, right)
        for one, right in zip(results, whole.right, strict=True)
        if one in answered and one.text != right.text
    ]
    assert not wrong
    assert all(one.num_tokens == LENGTH for one in answered)
    assert not [one for one in results if one.outcome == CLOSED]
    _note(f"| {point} | {ACTIONS[action]} | {len(answered)} | {REQUESTS - len(answered)} | {took_s:.1f} |")


def _note(line: str) -> None:
    if path := os.environ.get(RESULTS):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
