"""The cost of a router over vLLM workers: its CPU time, and what it adds to the latency of a stream.

    python benchmarks/route.py                          pdserve route, and our own instances
    python benchmarks/route.py --router BIN/vllm-router   with its peer in the same run
    python benchmarks/route.py --profile /tmp/route.prof --only cost

A router's process runs on the first core; fake workers that replay a stream (front_door/http_workers.py) and a client
with raw sockets run on the second. CPU time is that of all threads of the router's process, as counted by the kernel's
scheduler, minus its idle use. Every prompt is a text of 64 words; `pdserve` tokenises it and detokenises the answer.

    cost       64 streams of 2 tokens and of 256, a step every 20 ms: CPU of a 2-token request, and of one more token
    latency    64 streams of 64 to 192 tokens, a step every 20 ms: of the first token since the request was sent, of the
               others since their step; `direct` is the same client talking to the workers without a router
    many       1,000 streams of 20 tokens/s each: the lag of tokens in the first and the last quarter of the full load
    placement  among 1,000 members, in this process: CPU time of one decision, and of placing and releasing a prompt,
               which also reads the members' loads and adds to their in-flight ledgers

Our own instances (gRPC, front_door/instances.py) set their own pace, so their latency is not measured.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.front_door.cpu import cpu_by_thread, idle_cpu
from benchmarks.front_door.members import place_and_release, registry_of
from benchmarks.front_door.servers import Server, parser_of, start_child, start_ours, start_route, start_router
from benchmarks.frontdoor import ask, cpu_name, spent
from benchmarks.hop import command_output
from benchmarks.kv.control import Child
from scheduler.grants import Placer
from scheduler.load.loads import InstanceLoad, PromptFacts
from scheduler.placement import place
from wire.types import Role

CASES = ("cost", "latency", "many", "placement")
STEP_S, MANY_STEP_S = 0.02, 0.05
GOALS = {
    "pdserve route": {"token_us": 40.0, "request_us": 800.0, "added_p50_ms": 2.0, "added_p99_ms": 6.0},
    "pdserve": {"token_us": 25.0, "request_us": 400.0},
    "placement": {"placement_p99_ms": 1.0},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each server; print a JSON line for each figure and a table."""
    args = parse(arguments)
    model = args.model or command_output("model", "path")
    rows = [*placement(), *asyncio.run(whole_placement())] if "placement" in args.only else []
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})  # inherited by the children
    for name in args.server:
        with ExitStack() as stack:
            server = start(stack, name, model, args)
            if server is None:
                continue
            for task in Path(f"/proc/{server.pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {cores[0]})
            load = start_child(stack, "paced_load")
            rows += measure(server, load, args)
    for row in rows:
        print(json.dumps(row), flush=True)
    print_table(rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__, CASES, "tokens")
    servers = ("route", "instances", "router")
    parser.add_argument("--server", nargs="+", choices=servers, default=servers, help="default: all")
    return parser.parse_args(arguments)


def start(stack: ExitStack, name: str, model: str, args: argparse.Namespace) -> Server | None:
    """Start a server; return None for vllm-router if --router is not given."""
    if name == "route":
        return start_route(stack, model, args.flag, args.profile)
    if name == "instances":
        return start_ours(stack, model, args.flag, None)
    return start_router(stack, args.router) if args.router else None


def measure(server: Server, load: Child, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of each case; the first requests warm up and are not counted."""
    server.pace(STEP_S)
    streams(server, load, requests=128, concurrency=64, max_tokens=4)
    idle = idle_cpu(server.pid, 2.0)
    for case in args.only:
        if case == "cost":
            yield from cost(server, load, idle, args.scale)
        elif case == "latency" and server.name != "pdserve":
            yield from latency(server, load, args.scale)
        elif case == "many":
            yield from many(server, load, idle, args.scale)


def cost(server: Server, load: Child, idle: float, scale: float) -> Iterator[dict[str, Any]]:
    """Yield the CPU time of a request and of a token."""
    used_us = {}
    for tokens in (2, 256):
        requests = int((640 if tokens == 2 else 128) * scale) or 1
        before = cpu_by_thread(server.pid)
        result = streams(server, load, requests=requests, concurrency=64, max_tokens=tokens)
        used_us[tokens], threads = spent(server, before, idle * result["seconds"], requests)
    yield row(server.name, "request, 64 streams", "request_us", used_us[2])
    token_us = (used_us[256] - used_us[2]) / 254
    yield row(server.name, "token, 64 streams", "token_us", token_us, threads_us_a_request=threads)


def latency(server: Server, load: Child, scale: float) -> Iterator[dict[str, Any]]:
    """Yield the latency with and without the router, in turn."""
    found: dict[str, list[dict[str, Any]]] = {"direct": [], server.name: []}
    for _ in range(3):
        for name, changes in (("direct", direct(server)), (server.name, {})):
            spec = {"requests": int(128 * scale) or 1, "concurrency": 64, "max_tokens": 192, "least_tokens": 64}
            found[name].append(streams(server, load, ramp_s=1.0, **spec, **changes))
    for figure in ("first", "token"):
        for percent in ("p50", "p99"):
            value, base = (
                statistics.median(result[f"{figure}_{percent}_ms"] for result in found[name])
                for name in (server.name, "direct")
            )
            shown = f"{'first token' if figure == 'first' else 'token'}, added {percent}"
            yield row(server.name, shown, f"added_{percent}_ms", value - base, with_router=value, direct=base)


def many(server: Server, load: Child, idle: float, scale: float) -> Iterator[dict[str, Any]]:
    """Yield the lag of tokens of 1,000 streams, and the share of the core in use."""
    server.pace(MANY_STEP_S)
    spec = {"requests": 1000, "concurrency": 1000, "max_tokens": int(300 * scale) or 2, "ramp_s": 5.0}
    before = cpu_by_thread(server.pid)
    result = streams(server, load, step_s=MANY_STEP_S, **spec)
    used_us, _ = spent(server, before, idle * result["seconds"], 1)
    yield row(server.name, "1,000 streams, share of the core", "core_percent", used_us / result["seconds"] / 1e4)
    if server.name != "pdserve":
        alone = streams(server, load, step_s=MANY_STEP_S, **spec, **direct(server))
        for name in (f"{part}_{percent}_ms" for part in ("early", "late") for percent in ("p50", "p99")):
            shown = f"1,000 streams, {name.replace('_', ' lag ', 1).removesuffix('_ms')}"
            yield row(server.name, shown, name, result.get(name, -1.0), direct=alone.get(name, -1.0))
    server.pace(STEP_S)


def direct(server: Server) -> dict[str, Any]:
    """Return the fields of a run whose client talks to the workers without the router."""
    assert server.workers is not None
    return {"port": server.workers.ready["decode"], "prefill_port": server.workers.ready["prefill"]}


def streams(server: Server, load: Child, **changes: Any) -> dict[str, Any]:
    """Have the client do one run of streams. Raises SystemExit unless every answer is a 200."""
    return ask(server, load, **{"stream": True, "step_s": STEP_S, **changes})


def placement(num_members: int = 1000, decisions: int = 300) -> Iterator[dict[str, Any]]:
    """Yield the time of a decision among members with some load, half of them prefill and half decode."""
    rng, times_s = random.Random(1), []
    for _ in range(decisions):
        loads = [_load(index, rng) for index in range(num_members)]
        prompt = PromptFacts(rng.randrange(16, 4000), rng.randrange(2, 1000))
        began = time.thread_time()
        assert place(loads, prompt) is not None
        times_s.append(time.thread_time() - began)
    yield from _placement_rows(f"decision among {num_members:,}", "placement", times_s)


async def whole_placement(num_members: int = 1000, decisions: int = 300) -> list[dict[str, Any]]:
    """Return the time of placing and releasing a prompt. The loop runs nothing meanwhile."""
    rng, times_s = random.Random(1), []
    placer = Placer(registry_of(num_members, rng))
    for _ in range(decisions):
        began = time.thread_time()
        place_and_release(placer, rng)
        times_s.append(time.thread_time() - began)
    return list(_placement_rows(f"prompt placed and released among {num_members:,}", "whole_placement", times_s))


def _placement_rows(figure: str, kind: str, times_s: list[float]) -> Iterator[dict[str, Any]]:
    for percent in (50, 99):
        value_ms = 1000 * sorted(times_s)[percent * len(times_s) // 100]
        yield row("placement", f"{figure}, p{percent}", f"{kind}_p{percent}_ms", value_ms)


def _load(index: int, rng: random.Random) -> InstanceLoad:
    role = Role.PREFILL if index % 2 else Role.DECODE
    free, sequences = rng.randrange(5000, 10_000), rng.randrange(64)
    waits = rng.randrange(0, 8000) if role is Role.PREFILL else 0
    return InstanceLoad(index, f"{role}-{index}", role, waits, 8192, 10_000, free, 16, sequences, 0, 1024)


def row(server: str, figure: str, kind: str, value: float, **more: Any) -> dict[str, Any]:
    """Return one figure with its goal, and how busy the machine was."""
    goal = {"goal": goal} if (goal := GOALS.get(server, {}).get(kind)) is not None else {}
    shown = {"value": round(value, 2), **goal, "load_1min": round(os.getloadavg()[0], 1)}
    rounded = {name: round(one, 2) if isinstance(one, float) else one for name, one in more.items()}
    return {"server": server, "figure": figure, "kind": kind, **shown, **rounded}


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per figure and one column per server, goals in brackets."""
    servers = list(dict.fromkeys(row["server"] for row in rows))
    print(f"\n| figure | {' | '.join(servers)} |\n|---|{'---|' * len(servers)}")
    for figure in dict.fromkeys(row["figure"] for row in rows):
        found = {row["server"]: row for row in rows if row["figure"] == figure}
        cells = [f"{found[name]['value']:,}{_goal(found[name])}" if name in found else "-" for name in servers]
        print(f"| {figure} | {' | '.join(cells)} |")
    print(f"\n{cpu_name()}, one core for the router; microseconds of CPU, milliseconds of time (goal)")


def _goal(row: dict[str, Any]) -> str:
    return f" ({row['goal']:,g})" if "goal" in row else ""


if __name__ == "__main__":
    main()
