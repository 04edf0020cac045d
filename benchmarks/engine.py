"""Rates of one engine in one process, beside what this machine's memory and arithmetic allow in the same run.

    python benchmarks/engine.py                      the default model, all cores
    python benchmarks/engine.py MODEL --threads 1 --dtype bfloat16
    python benchmarks/engine.py --profile            where one prefill and the decode steps spend their time

Prompts of random tokens, greedy, no end-of-sequence, nothing cached between runs. JSON lines; times are medians of
--repeats. The rate of decoding takes the prefill's time off the whole run's, so it is the difference of two long
times and means little on a disturbed machine; `median_full_step_ms` times each step that decodes the whole batch and
nothing else. `fraction` is the floor's time over the time taken (over the full step's, for decoding): a step reads the
weights and the batch's KV once and multiplies at the speed measured here, whichever takes longer.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.torch_start import prepare_torch
from wire.model_identity import stored_tensors

PROMPT, OUT, PREFILL_PROMPT = 256, 64, 512
OFFLINE_REQUESTS = 32
DECODE_BATCHES, PREFILL_REQUESTS = (1, 8, 32, 64), (1, 4)
READ_BYTES = 1 << 30
KV_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Floors:
    """What the machine can do: GFLOP/s of the model's matrix products and GB/s of plain reads."""

    gflops: float
    read_gbs: float
    weight_bytes: int
    weight_flops: int  # of one token, all linear layers but the one that makes logits
    logit_flops: int
    kv_token_bytes: int

    def decode_s(self, batch: int) -> float:
        """Return seconds of one decode step of `batch` sequences, half way through their output."""
        read = self.weight_bytes + batch * (PROMPT + OUT // 2) * self.kv_token_bytes
        return max(read / self.read_gbs / 1e9, batch * (self.weight_flops + self.logit_flops) / self.gflops / 1e9)

    def prefill_s(self, requests: int, prompt: int) -> float:
        """Return seconds of prefilling `requests` prompts."""
        return requests * (prompt * self.weight_flops + self.logit_flops) / self.gflops / 1e9


class Bench:
    """One engine and the random prompts it runs."""

    def __init__(self, model: Any, repeats: int, chunk: int) -> None:
        from engine.core import EngineCore

        self.core = EngineCore(model, max_num_seqs=64, max_num_batched_tokens=8192, prefill_chunk_size=chunk)
        self._repeats, self._rng, self._added = repeats, random.Random(0), 0
        self.full_steps_s: list[float] = []

    def add(self, requests: int, prompt: int, out: int) -> None:
        """Queue prompts of random tokens."""
        from wire.types import PromptState, SamplingParams

        vocabulary = range(100, min(40_000, self.core.info.vocab_size))
        for _ in range(requests):
            self._added += 1
            ids = tuple(self._rng.choices(vocabulary, k=prompt))
            name = f"bench-{self._added}"
            self.core.add(PromptState(name, name, ids, SamplingParams(max_tokens=out, temperature=0.0)))

    def run(self, requests: int, prompt: int, out: int) -> float:
        """Return seconds until all of `requests` prompts have `out` tokens each."""
        self.add(requests, prompt, out)
        began, tokens = time.perf_counter(), 0
        while self.core.has_work():
            load = self.core.load()
            result = self.core.step()
            tokens += len(result.tokens)
            if load.running == requests and load.uncomputed_tokens == 0:
                self.full_steps_s.append(result.seconds)
        assert tokens == requests * out, f"{tokens} tokens instead of {requests * out}"
        return time.perf_counter() - began

    def median(self, requests: int, prompt: int, out: int) -> float:
        """Return the median seconds of `run`."""
        return statistics.median(self.run(requests, prompt, out) for _ in range(self._repeats))


def main() -> None:
    """Load, measure the machine and the engine, print JSON lines."""
    args = parse()
    threads = args.threads or len(os.sched_getaffinity(0))
    prepare_torch(threads)
    from engine.loader import load_model

    path = Path(args.model) if args.model else default_model()
    loaded = load_model(path, dtype=args.dtype, block_size=16, kv_cache_memory=KV_BYTES, num_threads=threads)
    info = loaded.model.info
    say(measure="setup", model=info.model.name, dtype=info.dtype, threads=threads, chunk=args.chunk, cpu=cpu_name())
    bench = Bench(loaded.model, args.repeats, args.chunk)
    bench.run(2, 32, 8)
    if args.profile:
        profile(bench)
    else:
        measure(bench, floors(path, info))


def measure(bench: Bench, floor: Floors) -> None:
    """Print every rate and the fraction of its floor."""
    for n in PREFILL_REQUESTS:
        s = bench.median(n, PREFILL_PROMPT, 1)
        fraction = floor.prefill_s(n, PREFILL_PROMPT) / s
        say(
            measure="prefill", requests=n, prompt=PREFILL_PROMPT, tokens_per_s=n * PREFILL_PROMPT / s, fraction=fraction
        )
    for n in DECODE_BATCHES:
        first = bench.median(n, PROMPT, 1)
        bench.full_steps_s.clear()
        step_s = (bench.median(n, PROMPT, OUT) - first) / (OUT - 1)
        full_step_s = statistics.median(bench.full_steps_s)
        say(
            measure="decode", batch=n, prompt=PROMPT, tokens_per_s=n / step_s, ms_per_step=1000 * step_s,
            median_full_step_ms=1000 * full_step_s, floor_ms_per_step=1000 * floor.decode_s(n),
            fraction=floor.decode_s(n) / full_step_s,
        )  # fmt: skip
    s = bench.median(OFFLINE_REQUESTS, PROMPT, OUT)
    say(
        measure="offline", requests=OFFLINE_REQUESTS, prompt=PROMPT, out=OUT,
        out_tokens_per_s=OFFLINE_REQUESTS * OUT / s,
    )  # fmt: skip


def floors(path: Path, info: Any) -> Floors:
    """Measure the machine with plain torch, at the shapes of the model's own linear layers, and print what it does."""
    import torch

    sizes = [tensor.shape for tensor in stored_tensors(path) if len(tensor.shape) == 2]
    inner = [size for size in sizes if size[0] != info.vocab_size]
    gflops = {name: matmul_gflops(inner, getattr(torch, name)) for name in ("float32", "bfloat16")}
    read = read_gbs()
    say(measure="floor", **{f"matmul_gflops_{name}": rate for name, rate in gflops.items()}, read_gbs=read)
    num_inner = sum(rows * columns for rows, columns in inner)
    num_logit = info.vocab_size * next(size[1] for size in sizes if size[0] == info.vocab_size)
    return Floors(
        gflops=gflops[info.dtype],
        read_gbs=read,
        weight_bytes=(num_inner + num_logit) * getattr(torch, info.dtype).itemsize,
        weight_flops=2 * num_inner,
        logit_flops=2 * num_logit,
        kv_token_bytes=info.layout.token_bytes,
    )


def matmul_gflops(sizes: Sequence[tuple[int, ...]], dtype: Any) -> float:
    """Return GFLOP/s of 512 rows through one layer's worth of each distinct weight shape."""
    import torch

    layers = [torch.randn(size, dtype=dtype) for size in sorted(set(sizes))]
    inputs = [torch.randn(PREFILL_PROMPT, weight.shape[1], dtype=dtype) for weight in layers]

    def once() -> None:
        for rows, weight in zip(inputs, layers, strict=True):
            torch.nn.functional.linear(rows, weight)

    return 2 * PREFILL_PROMPT * sum(weight.numel() for weight in layers) / best_s(once, 20) / 1e9


def read_gbs() -> float:
    """Return GB/s of summing memory that no cache holds."""
    import torch

    memory = torch.ones(READ_BYTES // 4)
    return READ_BYTES / best_s(lambda: memory.sum(), 5) / 1e9


def best_s(call: Callable[[], object], times: int) -> float:
    """Return the shortest seconds of `times` calls, after one to warm up: a floor is what the machine can do."""
    call()
    shortest = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - began)
    return shortest


def profile(bench: Bench) -> None:
    """Print the operators of one prefill and of decode steps at the smallest and at a large batch."""
    profile_steps(bench, f"prefill 1 x {PREFILL_PROMPT}", 1, PREFILL_PROMPT, decode=False)
    for batch in (1, OFFLINE_REQUESTS):
        profile_steps(bench, f"decode, batch {batch}", batch, PROMPT, decode=True)


def profile_steps(bench: Bench, title: str, requests: int, prompt: int, *, decode: bool) -> None:
    """Run prompts to their end; profile the first step, or after all are prefilled ten of the others."""
    from torch.profiler import ProfilerActivity, profile

    bench.add(requests, prompt, OUT)
    while decode and bench.core.load().uncomputed_tokens:
        bench.core.step()
    num_steps = 10 if decode else 1
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        began = time.perf_counter()
        for _ in range(num_steps):
            bench.core.step()
        wall_us = (time.perf_counter() - began) * 1e6
    while bench.core.has_work():
        bench.core.step()
    events = recorded.key_averages()
    ops_us = sum(event.self_cpu_time_total for event in events)
    print(f"\n{title}: {wall_us / num_steps / 1000:.1f} ms a step, Python and the profiler {1 - ops_us / wall_us:.0%}")
    for event in sorted(events, key=lambda event: -event.self_cpu_time_total)[:12]:
        share, each = event.self_cpu_time_total / wall_us, event.self_cpu_time_total / num_steps / 1000
        print(f"  {event.key:48} {event.count / num_steps:6.0f} calls {each:8.2f} ms {share:5.0%}")


def say(**fields: object) -> None:
    """Print one JSON line; numbers to four digits."""
    short = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in fields.items()}
    print(json.dumps(short), flush=True)


def default_model() -> Path:
    """Return the folder of the default model."""
    from pdserve.model import ensure_default

    return ensure_default(os.environ)


def cpu_name() -> str:
    """Return the CPU's name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of the model (default: the default model)")
    parser.add_argument("--threads", type=int, help="threads of the engine (default: the cores of this process)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--chunk", type=int, default=512, help="--prefill-chunk-size (default: 512)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print where the time goes instead of rates")
    return parser.parse_args()


if __name__ == "__main__":
    main()
