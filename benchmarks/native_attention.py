"""Attention of one layer: our kernel against torch's, in alternating calls, and against the memory's read speed.

    python -P benchmarks/native_attention.py [--threads 2] [--dtype bfloat16] [--heads 9/3x64]

Layers take turns, so that keys are read from memory as in a model. The medians are printed; a single thread is timed
by its own CPU time, which is less affected by other load.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from engine.attention.interface import AttentionBackend, AttentionOptions, StepAttention
from engine.attention.native import NativeAttention
from engine.attention.torch_cpu import TorchCpuAttention
from engine.step import BatchSequence, StepBatch
from engine.step_metadata import StepMetadata, build
from native.engine_library import build_engine

_BLOCK_SIZE = 16
_CASES = {
    "decode 1 x 288": [(287, 1)],
    "decode 8 x 288": [(287, 1)] * 8,
    "decode 32 x 288": [(287, 1)] * 32,
    "decode 64 x 288": [(287, 1)] * 64,
    "decode 1 x 8192": [(8191, 1)],
    "prefill 1 x 512": [(0, 512)],
    "prefill 4 x 512": [(0, 512)] * 4,
    "chunk 512 after 2048": [(2048, 512)],
    "chunk 64 + decode 32": [(256, 64)] + [(287, 1)] * 32,
}  # (start, count) of each sequence


class Case:
    """One step over the pools of several layers."""

    def __init__(self, shape: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype) -> None:
        self.num_heads, num_kv_heads, dim = heads
        blocks = [-(-(start + count) // _BLOCK_SIZE) for start, count in shape]
        self.metadata = _metadata(shape, blocks)
        num_slots, self.num_tokens = sum(blocks) * _BLOCK_SIZE, sum(count for _, count in shape)
        self.kv_bytes = sum(map(sum, shape)) * num_kv_heads * dim * 2 * dtype.itemsize
        num_layers = max(2, min(30, (600 << 20) // self.kv_bytes))
        self.pools = [torch.randn(2, num_slots, num_kv_heads, dim).to(dtype) for _ in range(num_layers)]
        self.query = torch.randn(self.num_tokens, self.num_heads, dim).to(dtype).transpose(0, 1)
        self.options = AttentionOptions(dim**-0.5)
        self.clock = _clock()

    def seconds(self, step: StepAttention, layer: int) -> float:
        """Return the seconds of one layer."""
        keys, values = self.pools[layer % len(self.pools)]
        began = self.clock()
        step.attend(self.query, keys, values, self.options)
        return self.clock() - began


def _metadata(shape: list[tuple[int, int]], blocks: list[int]) -> StepMetadata:
    free = list(range(sum(blocks)))
    random.Random(1).shuffle(free)
    sequences = []
    for (start, count), needed in zip(shape, blocks, strict=True):
        sequences.append(BatchSequence(start, count, tuple(free[:needed])))
        free = free[needed:]
    tokens = (0,) * sum(count for _, count in shape)
    return build(StepBatch(tokens, tuple(sequences), ()), block_size=_BLOCK_SIZE, device=torch.device("cpu"))


def _clock() -> Callable[[], float]:
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def read_speed(num_bytes: int = 1 << 29) -> float:
    """Return GB/s of a sum over memory by torch's threads."""
    words = torch.ones(num_bytes // 4, dtype=torch.float32)
    clock, times = _clock(), []
    for _ in range(7):
        began = clock()
        words.sum()
        times.append(clock() - began)
    return num_bytes / median(times) / 1e9


def compare(case: Case, backends: list[AttentionBackend], rounds: int) -> list[float]:
    """Return the median seconds of a layer for each backend; they take turns."""
    steps = [backend.plan(case.metadata) for backend in backends]
    times: list[list[float]] = [[] for _ in steps]
    for number in range(rounds):
        for step, seconds in zip(steps, times, strict=True):
            for layer in range(3):
                seconds.append(case.seconds(step, 3 * number + layer))
    return [median(seconds[3:]) for seconds in times]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--heads", default="9/3x64", help="query heads / KV heads x dim (9/3x64)")
    parser.add_argument("--isa", help="instruction set of the native kernel (default: the best that the CPU has)")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    heads, _, dim = args.heads.partition("x")
    num_heads, num_kv_heads = map(int, heads.split("/"))
    threads = build_engine().threads(args.threads, isa=args.isa)
    backends: list[AttentionBackend] = [NativeAttention(threads), TorchCpuAttention()]
    sys.stdout.write(f"{args.threads} threads, {threads.isa}, {args.dtype}, reads {read_speed():.1f} GB/s\n")
    sys.stdout.write("| case | native us | torch us | ratio | native reads KV at GB/s |\n|---|---|---|---|---|\n")
    for name, shape in _CASES.items():
        if args.only not in name:
            continue
        case = Case(shape, (num_heads, num_kv_heads, int(dim)), getattr(torch, args.dtype))
        ours, theirs = compare(case, backends, args.rounds)
        speed = case.kv_bytes / ours / 1e9
        sys.stdout.write(f"| {name} | {ours * 1e6:.0f} | {theirs * 1e6:.0f} | {theirs / ours:.2f} | {speed:.1f} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
