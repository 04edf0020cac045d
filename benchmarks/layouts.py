"""The loads of `pdserve bench pd` on larger clusters, in the simulator: P/D, --path auto, and combined instances.

    python benchmarks/layouts.py                          4, 16 and 64 instances, half of them prefill
    python benchmarks/layouts.py --instances 64 --step-cost 13,0.9,1.4

Each load is as many times that of one pair as the cluster has pairs; only "one at a time" is the same for all. A trace
has fixed arrivals: "one at a time" sends a request every 3 s, and a chat sends its next turn every 10 s. The costs (ms
of a step, of each sequence in it, of each prompt token) are by default those of the default model on one slow core.
"""

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pdserve.simulate import roles_of, row_of, step_cost_of
from simulation.cluster import Shape
from simulation.replay import simulate
from simulation.trace import TraceRequest, poisson

_ONE_EVERY_S, _TURN_EVERY_S = 3.0, 10.0
_BLOCK = 512
"""Tokens of one prefix block: a trace names such blocks by number."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate every load on every cluster; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--step-cost", default="13,0.9,1.4")
    parser.add_argument("--gap-limit", type=float, default=0.1)
    args = parser.parse_args(arguments)
    cost = step_cost_of(args.step_cost)
    print("| instances | load | layout | tokens/s | TTFT p50, ms | TTFT p95, ms | longest gap p99, ms |")
    print("|---|---|---|---|---|---|---|")
    for count in args.instances:
        pair, combined = f"{count // 2}P{count // 2}D", f"{count}C"
        shapes = {name: Shape(roles_of(name), cost, gap_limit_s=args.gap_limit) for name in (pair, combined)}
        shapes[f"{pair} auto"] = shapes[pair].comparing_paths()
        for load, trace in traces(count // 2).items():
            for name, shape in shapes.items():
                row = row_of(name, simulate(shape, trace))
                times = (row.ttft_p50_ms, row.ttft_p95_ms, row.longest_gap_p99_ms)
                figures = " | ".join(f"{value:,.0f}" for value in (row.tokens_per_s, *times))
                print(f"| {count} | {load} | {name} | {figures} |", flush=True)


def traces(pairs: int) -> Mapping[str, list[TraceRequest]]:
    """Return the loads for `pairs` pairs of instances."""
    streams = [TraceRequest(0.0, 64, 256)] * 8 * pairs
    burst = [TraceRequest(2.0, 256, 8)] * 32 * pairs
    return {
        "one at a time, 512/64": [TraceRequest(number * _ONE_EVERY_S, 512, 64) for number in range(10)],
        "32 at once for each pair, 256/64": poisson(32 * pairs, 0, 256, 64, 0),
        "Poisson 1/s for each pair, 256/64": poisson(25 * pairs, 1.0 * pairs, 256, 64, 1),
        "Poisson 3/s for each pair, 256/64": poisson(40 * pairs, 3.0 * pairs, 256, 64, 2),
        "8 streams for each pair, burst of 32 x 256/8": streams + burst,
        "8 chats of 5 turns for each pair, 512/32 a turn": list(_chats(8 * pairs)),
        "Poisson 0.8/s for each pair, 1024/16": poisson(16 * pairs, 0.8 * pairs, 1024, 16, 3),
    }


def _chats(count: int) -> list[TraceRequest]:
    """Return chats that begin with the same block; each turn's prompt is that of the turn before and a new block."""
    numbers, requests = random.Random(4), []
    for chat in range(count):
        begun_s = numbers.uniform(0.0, _TURN_EVERY_S)
        for turn in range(1, 6):
            blocks = (0, *(1 + chat * 5 + at for at in range(turn)))
            requests.append(TraceRequest(begun_s + turn * _TURN_EVERY_S, len(blocks) * _BLOCK, 32, blocks))
    return sorted(requests, key=lambda request: request.arrival_s)


if __name__ == "__main__":
    main()
