"""Our LLM class and vLLM's in turn, with the same requests on the same cores, in one run.

    python benchmarks/offline.py MODEL_DIR                        256 requests, 3 rounds, both contestants
    python benchmarks/offline.py MODEL_DIR --requests 16 --rounds 1 --no-peer

Prompts have 32 to 1,024 random tokens and outputs 16 to 128, as --seed determines; greedy, without end of sequence or
prefix cache, bfloat16, at most 256 sequences per step and 2 GiB of KV on both sides. Each round runs both, one paused
while the other is measured, so that a noisy machine disturbs both alike. The seconds are those of one call of
LLM.generate. The script prints medians over the rounds: each side's input and output tokens per second, and the ratio
of ours to theirs (goal: 1.5). vLLM's CPU build is found as by `pdserve bench engine --peer vllm`:
benchmarks/peers/setup, PEERS_HOME.
"""

import argparse
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pdserve import LLM, SamplingParams  # noqa: E402 - of this clone
from pdserve.bench.vllm import peers_home  # noqa: E402

SCRIPT = ROOT / "benchmarks" / "peers" / "vllm_offline.py"
PROMPT, OUTPUT = (32, 1024), (16, 128)
FIRST_ID, LAST_ID = 100, 40_000
GOAL = 1.5
WAIT_S = 1800.0
Request = tuple[list[int], int]


def workload(count: int, seed: int, last_id: int = LAST_ID) -> list[Request]:
    """Return prompts of random ids, each with the number of its output tokens."""
    numbers = random.Random(seed)
    ids = range(FIRST_ID, last_id)
    return [(numbers.choices(ids, k=numbers.randint(*PROMPT)), numbers.randint(*OUTPUT)) for _ in range(count)]


class Contestant(Protocol):
    """Runs a list of requests."""

    name: str

    def run(self, requests: Sequence[Request]) -> float:
        """Return the seconds of all requests."""
        ...

    def close(self) -> None:
        """Stop its processes."""
        ...


class Ours:
    """LLM in this process."""

    name = "pdserve"

    def __init__(self, model: str, dtype: str, engine: str, chunk: int | None) -> None:
        self._llm = LLM(
            model, dtype=dtype, max_model_len=2048, max_num_seqs=256, enable_prefix_caching=False,
            kv_cache_memory="2GiB", engine=engine, prefill_chunk_size=chunk,
        )  # fmt: skip
        self.run([([FIRST_ID] * 32, 8)] * 2)

    def run(self, requests: Sequence[Request]) -> float:
        """Time one call of generate."""
        prompts = [ids for ids, _ in requests]
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in requests]
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        _check(sum(len(output.outputs[0].token_ids) for output in outputs), requests)
        return seconds

    def close(self) -> None:
        """Close the engine."""
        self._llm.close()


class Vllm:
    """vLLM's LLM in its own environment and process group, stopped while ours is measured."""

    name = "vllm"

    def __init__(self, model: str, dtype: str) -> None:
        home = peers_home(os.environ)
        python, log = home / "vllm" / "bin" / "python", home / "vllm-offline.log"
        if not python.exists():
            raise SystemExit(f"{python} is missing: run benchmarks/peers/setup vllm, set PEERS_HOME, or pass --no-peer")
        self._replies, theirs = os.pipe()
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        own = {
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
        }  # fmt: skip
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(python), "-u", str(SCRIPT), model, dtype, str(theirs)], stdin=subprocess.PIPE, stdout=output,
                stderr=subprocess.STDOUT, pass_fds=[theirs], env=os.environ | own, start_new_session=True,
            )  # fmt: skip
        os.close(theirs)
        self._log = log
        self.version = self._reply()["version"]
        self._signal(signal.SIGSTOP)

    def run(self, requests: Sequence[Request]) -> float:
        """Resume vLLM until it has answered."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(requests).encode() + b"\n")
        self._process.stdin.flush()
        reply = self._reply()
        self._signal(signal.SIGSTOP)
        _check(reply["tokens"], requests)
        return float(reply["seconds"])

    def close(self) -> None:
        """Kill the whole process group."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        os.close(self._replies)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _reply(self) -> Any:
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self._replies], [], [], WAIT_S)[0] or not (piece := os.read(self._replies, 4096)):
                self.close()
                raise SystemExit(f"vLLM exited, or did not answer for {WAIT_S:g} s: see {self._log}")
            line += piece
        return json.loads(line)


def _check(tokens: int, requests: Sequence[Request]) -> None:
    wanted = sum(count for _, count in requests)
    assert tokens == wanted, f"{tokens} tokens instead of {wanted}"


def rates(requests: Sequence[Request], seconds: Sequence[float]) -> dict[str, float]:
    """Return tokens per second of the median round."""
    median = statistics.median(seconds)
    tokens_in, tokens_out = sum(len(ids) for ids, _ in requests), sum(count for _, count in requests)
    return {
        "seconds": round(median, 3), "in_tokens_per_s": round(tokens_in / median, 1),
        "out_tokens_per_s": round(tokens_out / median, 1),
        "tokens_per_s": round((tokens_in + tokens_out) / median, 1),
    }  # fmt: skip


def main() -> None:
    """Run the rounds and print one JSON line for each side, and the ratio."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("model", help="folder of the model")
    flags.add_argument("--requests", type=int, default=256)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--dtype", default="bfloat16")
    flags.add_argument("--last-id", type=int, default=LAST_ID, help="token ids are below this")
    flags.add_argument("--engine", default="torch", choices=("torch", "fake"), help="our engine")
    flags.add_argument("--chunk", type=int, help="our maximum prompt tokens in one step (default: the engine's)")
    flags.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True, help="run vLLM too")
    args = flags.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a paused process is killed
    requests = workload(args.requests, args.seed, args.last_id)
    sides: list[Contestant] = [Vllm(args.model, args.dtype)] if args.peer else []
    try:
        sides.append(Ours(args.model, args.dtype, args.engine, args.chunk))
        seconds: dict[str, list[float]] = {side.name: [] for side in sides}
        for _ in range(args.rounds):
            for side in sides:
                seconds[side.name].append(side.run(requests))
    finally:
        for side in sides:
            side.close()
    for name, found in seconds.items():
        print(json.dumps({"side": name, **rates(requests, found), "rounds_s": [round(one, 3) for one in found]}))
    if args.peer:
        ratio = statistics.median(seconds["vllm"]) / statistics.median(seconds["pdserve"])
        print(json.dumps({"ratio": round(ratio, 3), "goal": GOAL, "met": ratio >= GOAL}))


if __name__ == "__main__":
    main()
