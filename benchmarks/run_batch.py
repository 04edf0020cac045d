"""The overhead of the batch runner over its engine, and how busy it keeps a prefill and a decode instance.

    python benchmarks/run_batch.py                                   both measures, the default model
    python benchmarks/run_batch.py --only here --requests 16 --model MODEL_DIR

here   one model in this process, in turn: the file by the batch runner, and the same bodies as plain calls of the same
       app, as many at once, with nothing stored. `more` is the runner's extra time relative to the plain calls, medians
       over the rounds (goal: at most 3 %); `busy` is the engine's share of the runner's time (its step seconds).
pair   one prefill and one decode instance by `pdserve up`, used as with --base-url: 200 lines of 256 tokens in and 64
       out. `busy` is each instance's share of the time from the first line sent to the last one answered
       (pdserve_step_seconds_total); the goal is 90 % for the busier one.

Prompts are random token ids, by --seed; greedy, without end of sequence or prefix cache. One JSON line per measure.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from batch.app_backend import AppBackend  # noqa: E402
from batch.backend import BatchBackend  # noqa: E402 - of this clone
from batch.job import BatchJob  # noqa: E402
from batch.prepared_job import prepare  # noqa: E402
from batch.runner import run_batch  # noqa: E402
from batch.url_backend import UrlBackend  # noqa: E402
from benchmarks.hop import command_output  # noqa: E402
from flags.options import EngineOptions  # noqa: E402
from pdserve.bench.pd.utilisation import Counted, between, count  # noqa: E402
from pdserve.client import parse_metrics  # noqa: E402
from pdserve.inner_app import inner_app  # noqa: E402
from pdserve.ports import free_ports  # noqa: E402
from scheduler.config import SchedulerOptions  # noqa: E402
from scheduler.loop import run as run_loop  # noqa: E402

PATH = "/v1/completions"
FIRST_ID, LAST_ID = 10, 300
IN_FLIGHT_HERE, IN_FLIGHT_PAIR = 512, 64


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("here", "pair"))
    parser.add_argument("--model", help="folder of the model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, nargs=2, default=(256, 64), metavar=("IN", "OUT"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.model = args.model or command_output("model", "path")
    bodies = workload(args)
    for name, measure in (("here", here), ("pair", pair)):
        if args.only in (None, name):
            row = run_loop(measure(args, bodies))
            print(json.dumps({"measure": name, "requests": args.requests, "tokens": args.tokens, **row}), flush=True)


def workload(args: argparse.Namespace) -> list[bytes]:
    """Return the request bodies."""
    numbers, (tokens_in, tokens_out) = random.Random(args.seed), args.tokens
    fields = {"model": args.model, "max_tokens": tokens_out, "temperature": 0, "ignore_eos": True}
    prompts = (numbers.choices(range(FIRST_ID, LAST_ID), k=tokens_in) for _ in range(args.requests))
    return [json.dumps(fields | {"prompt": prompt}).encode() for prompt in prompts]


async def here(args: argparse.Namespace, bodies: Sequence[bytes]) -> dict[str, Any]:
    """Return the seconds of both, the runner's extra time, and how busy it keeps the engine."""
    engine = EngineOptions(model=args.model, dtype=args.dtype, enable_prefix_caching=False, kv_cache_memory=2**31)
    scheduler = SchedulerOptions(first_token_timeout=86_400.0, max_queued_requests=65_536)
    plain, ours, busy = list[float](), list[float](), list[float]()
    async with inner_app(engine, scheduler) as app:
        backend = AppBackend(app)
        await run_plain(backend, bodies[:4])
        for _ in range(args.rounds):
            plain.append(await run_plain(backend, bodies))
            before = await counted(backend)
            ours.append(await by_runner(backend, bodies, IN_FLIGHT_HERE))
            busy.append(max(between(before, await counted(backend), ours[-1]).busy.values()))
    medians = {"plain_s": plain, "runner_s": ours, "busy": busy}
    row = {name: round(statistics.median(values), 4) for name, values in medians.items()}
    return row | {"more": round(row["runner_s"] / row["plain_s"] - 1, 4)}


async def pair(args: argparse.Namespace, bodies: Sequence[bytes]) -> dict[str, Any]:
    """Return the seconds of one batch over 1P1D, and the share of them in which each instance computed."""
    async with up(args) as url, UrlBackend(url, connections=IN_FLIGHT_PAIR) as backend:
        await run_plain(backend, bodies[:4])
        rows = []
        for _ in range(args.rounds):
            before = await counted(backend)
            seconds = await by_runner(backend, bodies, IN_FLIGHT_PAIR)
            rows.append((seconds, between(before, await counted(backend), seconds).busy))
    seconds, busy = sorted(rows, key=lambda row: row[0])[len(rows) // 2]
    return {"runner_s": round(seconds, 3), "busy": {name: round(share, 3) for name, share in busy.items()}}


async def run_plain(backend: BatchBackend, bodies: Sequence[bytes]) -> float:
    """Return the seconds of plain calls, IN_FLIGHT_HERE at once."""
    room, began = asyncio.Semaphore(IN_FLIGHT_HERE), time.perf_counter()

    async def send(body: bytes) -> None:
        async with room:
            answer = await backend.send("POST", PATH, body)
        assert answer.status == 200, answer.body

    async with asyncio.TaskGroup() as group:
        for body in bodies:
            group.create_task(send(body))
    return time.perf_counter() - began


async def by_runner(backend: BatchBackend, bodies: Sequence[bytes], max_inflight: int) -> float:
    """Return the seconds of a batch, from before its file is read until its output is written."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        lines = (f'{{"custom_id":"{i}","method":"POST","url":"{PATH}","body":' for i in range(len(bodies)))
        source.write_bytes(b"".join(line.encode() + body + b"}\n" for line, body in zip(lines, bodies, strict=True)))
        began = time.perf_counter()
        with prepare(BatchJob(source, output, max_inflight=max_inflight)) as prepared:
            ended = await run_batch(prepared, backend, on_progress=lambda progress: None)
        seconds = time.perf_counter() - began
        assert (ended.done, ended.errors) == (len(bodies), 0), ended
        return seconds


async def counted(backend: BatchBackend) -> Counted:
    """Return the instances' counters, after waiting for their next load report."""
    await asyncio.sleep(1.0)
    return count(parse_metrics((await backend.send("GET", "/metrics")).body.decode()))


@asynccontextmanager
async def up(args: argparse.Namespace) -> AsyncIterator[str]:
    """Start one prefill and one decode instance and yield the scheduler's URL."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PDSERVE_RUN_DIR": folder}
        flags = ("--model", args.model, "--dtype", args.dtype, "--no-enable-prefix-caching", "--port", str(port))
        try:
            await asyncio.to_thread(_pdserve, env, "up", "--detach", *flags)
            yield f"http://127.0.0.1:{port}"
        finally:
            await asyncio.to_thread(_pdserve, env, "down")


def _pdserve(env: dict[str, str], *arguments: str) -> None:
    subprocess.run([sys.executable, "-P", "-m", "pdserve", *arguments], cwd=ROOT, env=env, check=True, stdout=2)


if __name__ == "__main__":
    main()
