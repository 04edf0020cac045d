"""The cost of the front door: CPU time of the scheduler process, with fake instances that only count tokens.

    python benchmarks/frontdoor.py                                          ours
    python benchmarks/frontdoor.py --router BIN/vllm-router --vllm BIN/vllm   with its peers in the same run
    python benchmarks/frontdoor.py --profile /tmp/front.prof --only stream-256

The real scheduler process listens on a real port, with two fake instances (gRPC, one process); a client with raw
sockets runs in a third process. CPU time is that of all threads of the measured process, as counted by the kernel's
scheduler, minus its idle use; `threads_us` lists the threads separately, idle use included: `loop` is the first, which
runs our event loop, `python` is gRPC's poller, `event_engine` are gRPC's own threads. Every stream has one event per
token, detokenised by the server; every prompt is text.

    request    64 in / 1 out (prefill only) and 64 in / 2 out (handed to decode), not streamed, at 1 and 256 at once
    token      256 tokens per stream, request included, at 1 and 256 streams; a step every 5 and 50 ms
    first byte of an idle server's stream, median of 50, the instances without delays
    lag        p99 of the round trips of GET /health on one connection while prompts of 4,000 words arrive, 64 at once

The peers: `vllm-router` in P/D mode over fake HTTP workers (it does not tokenise), and vLLM's API server, whose engine
runs in a separate process with one tiny random layer (it sets its own pace, so its wall times mean nothing here).
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.front_door.cpu import Pings, cpu_by_thread, idle_cpu
from benchmarks.front_door.servers import Server, parser_of, start_child, start_ours, start_router, start_vllm
from benchmarks.hop import command_output
from benchmarks.kv.control import Child

IDLE_S = 1.0
GOALS = {"request_us": 1200.0, "token_us": 50.0, "first_byte_ms": 3.0, "lag_p99_ms": 20.0}
CASES = ("request-1", "request-256", "stream-1", "stream-256", "first-byte", "lag")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure ours and the named peers; print a JSON line for each figure and a table."""
    args = parse(arguments)
    model = args.model or command_output("model", "path")
    with ExitStack() as stack:
        load = start_child(stack, "load")
        servers = [start_ours(stack, model, args.flag, args.profile)]
        if args.router:
            servers.append(start_router(stack, args.router))
        if args.vllm:
            servers.append(start_vllm(stack, args.vllm, model))
        rows = [row for server in servers for row in measure(server, load, args)]
    for row in rows:
        print(json.dumps(row), flush=True)
    print_table(rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__, CASES, "requests")
    parser.add_argument("--vllm", help="path of vllm")
    return parser.parse_args(arguments)


def measure(server: Server, load: Child, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each case; the first requests warm up and are not counted."""
    ask(server, load, requests=20, max_tokens=4, stream=True)
    idle = idle_cpu(server.pid, IDLE_S)
    yield {"server": server.name, "figure": "idle_cpu_percent", "value": round(100 * idle, 2)}
    for case in args.only:
        name, _, at_once = case.partition("-")
        if name in ("request", "stream"):
            measured = requests if name == "request" else streams
            rows = measured(server, load, int(at_once), idle, args.scale)
        elif server.workers is None:
            continue  # this would measure its own engine's pace
        else:
            rows = first_byte(server, load) if name == "first" else lag(server, load)
        yield from ({"server": server.name, **row} for row in rows)


def requests(server: Server, load: Child, at_once: int, idle: float, scale: float) -> Iterator[dict[str, Any]]:
    """Yield the CPU time of one request, with 1 and with 2 tokens."""
    server.pace(0.005 if at_once == 1 else 0.02)
    count = int((150 if at_once == 1 else 3000) * scale)
    for out in (1, 2):
        before = cpu_by_thread(server.pid)
        result = ask(server, load, concurrency=at_once, requests=count, max_tokens=out, stream=False)
        used_us, threads = spent(server, before, idle * result["seconds"], count)
        figure = f"request 64 in / {out} out, {at_once} at once"
        yield row(figure, "request_us", used_us, threads_us=threads, per_s=rate(count, result))


def streams(server: Server, load: Child, at_once: int, idle: float, scale: float) -> Iterator[dict[str, Any]]:
    """Yield the CPU time of one streamed token."""
    server.pace(0.005 if at_once == 1 else 0.05)
    count, tokens = at_once * (3 if at_once == 1 else 1), int(256 * scale)
    before = cpu_by_thread(server.pid)
    result = ask(server, load, concurrency=at_once, requests=count, max_tokens=tokens, stream=True)
    num_tokens = count * tokens
    used_us, threads = spent(server, before, idle * result["seconds"], num_tokens)
    figure = f"streamed token, {at_once} stream{'s' if at_once > 1 else ''}"
    more = {"events_a_token": round(result["events"] / num_tokens, 3), "per_s": rate(num_tokens, result)}
    yield row(figure, "token_us", used_us, threads_us=threads, **more)


def spent(server: Server, before: dict[str, float], idle_s: float, count: int) -> tuple[float, dict[str, float]]:
    """Return the CPU microseconds since `before`, divided by `count`, in all and by thread name."""
    after = cpu_by_thread(server.pid)
    used_us = 1e6 * (sum(after.values()) - sum(before.values()) - idle_s) / count
    each = {name: round(1e6 * (seconds - before.get(name, 0.0)) / count, 1) for name, seconds in after.items()}
    return used_us, {name: value for name, value in each.items() if value >= 1.0}


def first_byte(server: Server, load: Child) -> Iterator[dict[str, Any]]:
    """Yield the median time to the first byte of a stream."""
    server.pace(0.0)
    result = ask(server, load, requests=50, max_tokens=2, stream=True)
    yield row("first byte of one stream", "first_byte_ms", result["first_byte_ms"])


def lag(server: Server, load: Child) -> Iterator[dict[str, Any]]:
    """Yield the event loop's lag while long prompts arrive, three rounds of them."""
    server.pace(0.01)
    pings = Pings(server.port)
    client_thread = threading.Thread(
        target=ask, args=(server, load),
        kwargs={"concurrency": 64, "requests": 192, "prompt_words": 4000, "max_tokens": 1, "stream": False},
    )  # fmt: skip
    client_thread.start()
    while client_thread.is_alive():
        pings.ping()
    yield row("lag p99, 64 prompts of 4,000", "lag_p99_ms", pings.p99_ms(), pings=len(pings.round_trips_s))


def ask(server: Server, load: Child, **changes: Any) -> dict[str, Any]:
    """Have the client do one run. Raises SystemExit unless every answer is a 200."""
    run = {"port": server.port, "path": "/v1/completions", "model": server.model, "concurrency": 1, "prompt_words": 64}
    result = load.ask(**{**run, **changes})
    if result["failures"]:
        raise SystemExit(
            f"{server.name}: {result['failures']} of the requests failed, the first with {result['failure']}"
        )
    return result


def rate(count: int, result: dict[str, Any]) -> int:
    """Return the rate per second: it shows how busy the machine was, not what the server can do."""
    return round(count / float(result["seconds"]))


def row(figure: str, kind: str, value: float, **more: Any) -> dict[str, Any]:
    """Return one figure with its goal."""
    return {"figure": figure, "kind": kind, "value": round(value, 2), "goal": GOALS[kind], **more}


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per figure and one column per server."""
    servers = list(dict.fromkeys(row["server"] for row in rows))
    print(f"\n| figure | goal | {' | '.join(servers)} |\n|---|---|{'---|' * len(servers)}")
    for figure in dict.fromkeys(row["figure"] for row in rows):
        found = {row["server"]: row for row in rows if row["figure"] == figure}
        cells = [f"{found[name]['value']:,}" if name in found else "-" for name in servers]
        goal = next(iter(found.values())).get("goal", "-")
        print(f"| {figure} | {goal} | {' | '.join(cells)} |")
    print(f"\n{cpu_name()}, {len(os.sched_getaffinity(0))} cores; microseconds of CPU, milliseconds of time")


def cpu_name() -> str:
    """Return the kernel's name for this machine's processor."""
    result = subprocess.run(["cat", "/proc/cpuinfo"], capture_output=True, text=True, check=True).stdout
    return next((line.partition(":")[2].strip() for line in result.splitlines() if line.startswith("model name")), "?")


if __name__ == "__main__":
    main()
