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
from typing import Any, Self

import httpx
import openai
import pytest

from pdserve.client import Client
from pdserve.ports import free_ports
from pdserve.verify_endpoints import verify_endpoints
from testing.engine.fake_model import FakeConfig
from tests.engine.tiny_models import VOCAB_SIZE, save_tiny_tokenizer
from tests.faults.cases import ANSWER, CLOSED
from tests.faults.results import note
from tests.faults.slow import starve
from tests.faults.stream_request import StreamResult, request_stream
from tests.faults.worker_points import POINTS
from tests.pdserve.batches import BATCH, COMMAND, WORDS, read, run, write
from wire.errors import Unavailable

pytestmark = pytest.mark.cluster

REQUESTS = 20
AT_ONCE = 5
LENGTH = 24
BLOCK_SIZE = FakeConfig().block_size
STARVED_S = 300.0
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
ACTIONS = {"die": "killed", "stop": "stopped", "drop": "connection cut", "hang": "answers nothing", "error": "HTTP 500"}
ROWS = [(point, action) for point in POINTS for action in ACTIONS if action == "die" or "no request" not in point]
PUSH_ROWS = [(point, "die") for point, (_, when, _) in POINTS.items() if when not in (None, "read")]
"""The rows that run with NixlPushConnector too."""
OFTEN = ("D in mid-stream", "die")
"""The row that runs every time; tests/scheduler/test_worker_faults.py runs all of them in one process."""
STARVED = ("prefill-0", "decode-0", "scheduler")


class Processes:
    """The workers and the scheduler as processes; a worker that has died is started again on its port."""

    def __init__(self, folder: Path, model: Path, connector: str) -> None:
        self.ports = free_ports(5)
        self._connector = connector
        self._folder = folder
        self._model = model
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.client = Client(f"http://127.0.0.1:{self.ports[-1]}")

    def __enter__(self) -> Self:
        for name in NAMES:
            self.start(name)
        urls = [self.url(name) for name in NAMES]
        self._spawn(
            "scheduler", "pdserve", "route", "--prefill", *urls[:2], "--decode", *urls[2:], "--model",
            str(self._model), "--served-model-name", "tiny", "--port", str(self.ports[-1]),
            "--connector", self._connector, "--enable-prompt-tokens-details",
            "--run-dir", str(self._folder / "route"),
        )  # fmt: skip
        self.wait_whole()
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait(60)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[NAMES.index(name)]}"

    def start(self, name: str) -> None:
        """Start a worker."""
        fake = {"num_layers": 1, "vocab_size": VOCAB_SIZE, "step_seconds": 0.005}
        settings = json.dumps({"model": "tiny", "fake": fake, "connector": self._connector})
        port = str(self.ports[NAMES.index(name)])
        self._spawn(name, "testing.vllm_worker", "--port", port, "--settings", settings)

    def heal(self, name: str) -> None:
        """Let a stopped worker go on, and start one that has died again."""
        process = self._processes[name]
        process.send_signal(signal.SIGCONT)
        if process.poll() is not None:
            self.start(name)

    def kill(self, name: str) -> None:
        """End a worker at once."""
        self._processes[name].kill()
        self._processes[name].wait(60)

    def pid(self, name: str) -> int:
        """Return the process id of a worker or of the scheduler."""
        return self._processes[name].pid

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
            assert self._processes["scheduler"].poll() is None, "the scheduler has ended"
            assert time.monotonic() < deadline, ready
            time.sleep(0.1)

    def num_lost(self) -> int:
        """Return how often the scheduler has lost a worker."""
        return (self._folder / "scheduler.log").read_text().count(" instance_lost ")

    def _spawn(self, name: str, module: str, *arguments: str) -> None:
        root = str(Path(__file__).parents[2])
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
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
        temperature = 0.8 if number % 2 else 0.0
        async with room:
            return await request_stream(client, _prompt(number), LENGTH, temperature=temperature, seed=number)

    async with httpx.AsyncClient(base_url=processes.client.base_url, timeout=120.0) as client:
        return list(await asyncio.gather(*map(one, range(REQUESTS))))


def _prompt(number: int) -> list[int]:
    return [5 + number, *range(20, 20 + 40 + number)]


@pytest.mark.parametrize(
    ("whole", "point", "action"),
    [
        *(pytest.param("nixl", *row, marks=() if row == OFTEN else pytest.mark.long, id=" ".join(row)) for row in ROWS),
        *(pytest.param("nixl-push", *row, marks=pytest.mark.long, id=f"push {' '.join(row)}") for row in PUSH_ROWS),
    ],
    indirect=["whole"],
)
def test_a_fault_of_a_worker_loses_no_request(whole: Whole, point: str, action: str) -> None:
    processes = whole.processes
    leg, when, after_tokens = POINTS[point]
    victim = f"{leg}-0"
    if when is None:
        processes.kill(victim)
    else:
        fault = {"action": action, "point": when, "leg": leg, "after_tokens": after_tokens}
        Client(processes.url(victim)).post("/testing/faults", fault)
    began = time.monotonic()
    results = asyncio.run(_request_all(processes))
    took_s = time.monotonic() - began
    processes.heal(victim)
    processes.wait_whole()

    answered = _check(results, whole.right)
    note(f"| {point} | {ACTIONS[action]} | {answered} | {REQUESTS - answered} | {took_s:.1f} |")


@pytest.mark.long
@pytest.mark.parametrize("whole", ["nixl"], indirect=True)
@pytest.mark.parametrize("victim", STARVED)
def test_a_process_stopped_nine_tenths_of_the_time_is_not_lost(whole: Whole, victim: str) -> None:
    processes = whole.processes
    lost = processes.num_lost()

    async def run() -> list[StreamResult]:
        starving = asyncio.create_task(starve([processes.pid(victim)], time.monotonic() + STARVED_S))
        try:
            return await _request_all(processes)
        finally:
            starving.cancel()
            await asyncio.wait({starving})

    began = time.monotonic()
    results = asyncio.run(run())
    took_s = time.monotonic() - began

    assert _check(results, whole.right) == REQUESTS
    assert processes.num_lost() == lost
    note(f"| {victim} | stopped 0.9 s of every second | {REQUESTS} | 0 | {took_s:.1f} |")


@pytest.mark.long
@pytest.mark.parametrize("whole", ["nixl"], indirect=True)
def test_openais_client_and_run_batch_work_unchanged(whole: Whole, tmp_path: Path) -> None:
    url = whole.processes.client.base_url
    chat: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        plain = client.chat.completions.create(**chat)
        chunks = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
        texts = {
            word: client.completions.create(model="tiny", prompt=word, temperature=0).choices[0].text for word in WORDS
        }
    source, output = write(tmp_path / "in.jsonl", BATCH), tmp_path / "out.jsonl"
    ended = run(tmp_path, *COMMAND, "-i", source, "-o", output, "--base-url", url)

    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == (
        plain.choices[0].message.content
    )
    first, last = plain.usage, chunks[-1].usage
    assert first is not None
    assert last is not None
    assert last.total_tokens == first.total_tokens == first.prompt_tokens + 8
    assert (last.prompt_tokens, last.completion_tokens) == (first.prompt_tokens, first.completion_tokens)
    assert ended.status == 0, ended.err
    batched = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in read(output)}
    assert batched == {f"id-{word}": text for word, text in texts.items()}


@pytest.mark.long
@pytest.mark.parametrize("whole", ["nixl"], indirect=True)
def test_verify_reads_log_probabilities_over_workers(whole: Whole, capsys: pytest.CaptureFixture[str]) -> None:
    url = whole.processes.client.base_url  # twice: the doubles read no texts; a real pair is compared with its D

    assert verify_endpoints(url, url, 3, 8) == 0

    assert capsys.readouterr().out.splitlines()[-1].startswith("3 of 3 prompts equal; ")


@pytest.mark.long
@pytest.mark.parametrize("whole", ["nixl"], indirect=True)
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_bench_serve_measures_workers(whole: Whole, backend: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "pdserve", "bench", "serve", "--base-url", whole.processes.client.base_url]
    load = ("--backend", backend, "--num-prompts", "12", "--random-input-len", "40", "--random-output-len", "8")
    saved = ("--ignore-eos", "--request-rate", "50", "--save-result", "--save-detailed", "--result-dir", str(tmp_path))
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*command, *load, *saved], capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": root}
    )

    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert (result["model_id"], result["completed"], result["failed"]) == ("tiny", 12, 0)
    assert result["output_lens"] == [8] * 12
    assert result["p99_ttft_ms"] >= result["median_ttft_ms"] > 0


def _check(results: list[StreamResult], right: list[StreamResult]) -> int:
    """Check that every request ended once, with the right answer or an error; return how many were answered."""
    answered = [(one, correct) for one, correct in zip(results, right, strict=True) if one.outcome == ANSWER]
    assert not [(one, correct) for one, correct in answered if one.text != correct.text]
    for number, one in enumerate(results):
        if one.outcome == ANSWER:
            length = len(_prompt(number))
            assert (one.num_prompt_tokens, one.num_tokens) == (length, LENGTH), "usage counts once"
            assert one.num_cached_tokens in (0, (length - 1) // BLOCK_SIZE * BLOCK_SIZE), "of one placement"
    assert not [one for one in results if one.outcome == CLOSED]
    return len(answered)
