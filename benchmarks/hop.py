"""The cost of the KV hop to a client: a P/D pair and one combined instance in turn, each engine on one core.

    python benchmarks/hop.py                                      512 and 4,096 tokens, 20 requests to each side
    python benchmarks/hop.py --prompt-tokens 512 --runs 8 --transport tcp

Each side is a scheduler process, not bound to a core, with engines of one core each: P and D as `pdserve up` binds
them, the combined instance on the first core, all with the same chunk size. Both answer the same prompts in turn; the
side that starts alternates, so a noisy machine disturbs both alike.

Computed for every pair of requests, from the moment of sending, median over the pairs:
    hop       (second token of P/D - second token of combined) / first token of combined      goal: under 5%
    gap       the same for (second - first) of each side: the hop without the noise of two prefills
Then streams decode on D while such prompts are handed off to D one by one, each followed by a pause as long as it took:
    alone, kv   the gaps between the tokens of the streams in the pauses, and while a prompt is in progress
"""

import argparse
import http.client
import itertools
import json
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kv.control import ROOT
from benchmarks.kv.table import cpu

START_S = 300
HOP_GOAL = 0.05
WARM_UPS = 2
STREAMS = 8
Times = dict[str, list[tuple[float, float]]]


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Start both sides, measure in turn, stop both, print one JSON line for each length and a table."""
    args = parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the stack stops started processes
    pd_port, combined_port, instance_port = free_ports(3)
    rows = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hop-"))
        start_pd(stack, pd_port, args, folder)
        start_combined(stack, combined_port, instance_port, args, folder)
        for prompt_tokens in args.prompt_tokens:
            ports = {"pd": pd_port, "combined": combined_port}
            times = measure(ports, prompt_tokens, args.runs)
            gaps = measure_gaps(pd_port, prompt_tokens, args.runs, args.stream_tokens)
            rows.append({**summary(prompt_tokens, times, args), **gaps})
            print(json.dumps(rows[-1]), flush=True)
    print_table(rows)
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[512, 4096], help="default: 512 4096")
    parser.add_argument("--runs", type=int, default=20, help="requests to each side (default: 20)")
    parser.add_argument(
        "--stream-tokens",
        type=int,
        default=256,
        help=f"output tokens of each request of the {STREAMS} streams (default: 256)",
    )
    parser.add_argument("--chunk", type=int, default=512, help="--prefill-chunk-size of every engine (default: 512)")
    parser.add_argument("--dtype", default="auto", help="dtype of every engine (default: auto)")
    parser.add_argument("--model", help="folder of a model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--engine", default="torch", choices=("torch", "fake"), help="fake: a smoke run of this script")
    parser.add_argument("--transport", help="a --kv-transport of the pair (default: the pair chooses)")
    parser.add_argument(
        "--flags", default="", help="more flags of every engine, as one argument, such as '--device cuda'"
    )
    return parser.parse_args(arguments)


def flags_of(args: argparse.Namespace) -> list[str]:
    """Return the flags of every process of both sides."""
    model = args.model or command_output("model", "path")
    return ["--model", model, "--dtype", args.dtype, "--prefill-chunk-size", str(args.chunk), "--engine", args.engine,
            *shlex.split(args.flags)]  # fmt: skip


def start_pd(stack: ExitStack, port: int, args: argparse.Namespace, folder: str) -> None:
    """Start scheduler, P and D by `pdserve up`; the stack stops them."""
    env = {**os.environ, "PDSERVE_RUN_DIR": f"{folder}/pd"}
    transport = ["--kv-transport", args.transport] if args.transport else []
    stack.callback(pdserve, "down", env=env)
    pdserve("up", "--detach", "--port", str(port), *flags_of(args), *transport, env=env)


def start_combined(stack: ExitStack, port: int, instance_port: int, args: argparse.Namespace, folder: str) -> None:
    """Start a combined instance on the first core and a scheduler that is not bound to a core; the stack stops them."""
    core, flags, address = str(min(os.sched_getaffinity(0))), flags_of(args), f"127.0.0.1:{instance_port}"
    instance = ["taskset", "-c", core, sys.executable, "-P", "-m", "pdserve.combined", "--port", str(instance_port)]
    scheduler = [sys.executable, str(ROOT / "benchmarks" / "kv" / "combined_scheduler.py"), "--instance", address]
    for name, command in (("instance", [*instance, *flags]), ("scheduler", [*scheduler, "--port", str(port), *flags])):
        with Path(folder, f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        stack.callback(end, process)
    try:
        wait_ready(port)
    except SystemExit as error:
        logs = [Path(folder, f"{name}.log").read_text(errors="replace")[-800:] for name in ("instance", "scheduler")]
        raise SystemExit(f"{error}\n" + "\n".join(logs)) from None


def measure(ports: dict[str, int], prompt_tokens: int, runs: int) -> Times:
    """Return (first token s, second token s) of each request to each side, without the warm-ups."""
    rng, models = random.Random(1), {name: model_name(port) for name, port in ports.items()}
    times: Times = {name: [] for name in ports}
    for index in range(runs + WARM_UPS):
        prompt = [rng.randrange(100, 900) for _ in range(prompt_tokens)]
        names = list(ports) if index % 2 else list(reversed(ports))
        for name in names:
            first_and_second = two_tokens(ports[name], models[name], prompt)
            if index >= WARM_UPS:
                times[name].append(first_and_second)
        print(f"hop: {prompt_tokens} tokens, pair {index + 1} of {runs + WARM_UPS}", file=sys.stderr, flush=True)
    return times


def two_tokens(port: int, model: str, prompt: list[int]) -> tuple[float, float]:
    """Request a few tokens and return the arrival of the first two pieces of text, in seconds after sending."""
    began = time.perf_counter()
    arrivals = list(token_times(port, model, prompt, 12))
    return arrivals[0] - began, arrivals[1] - began


def measure_gaps(port: int, prompt_tokens: int, runs: int, stream_tokens: int) -> dict[str, Any]:
    """Return percentiles of the gaps between tokens of streams, in ms, and the KV bytes handed off meanwhile."""
    model, rng, over = model_name(port), random.Random(2), threading.Event()
    gaps: list[tuple[float, float]] = []
    windows: list[tuple[float, float]] = []

    def decode(number: int) -> None:
        while not over.is_set():
            gaps.extend(itertools.pairwise(token_times(port, model, [100 + number] * 16, stream_tokens)))

    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(decode, number) for number in range(STREAMS)]
        try:
            for index in range(runs + WARM_UPS):
                if index == WARM_UPS:
                    windows, bytes_before = [], handed_bytes(port)
                began = time.perf_counter()
                list(token_times(port, model, [rng.randrange(100, 900) for _ in range(prompt_tokens)], 2))
                windows.append((began, time.perf_counter()))
                time.sleep(windows[-1][1] - began)
            handed = handed_bytes(port) - bytes_before
        finally:
            over.set()
        for one in streams:
            one.result()
    found: dict[str, list[float]] = {"alone": [], "kv": []}
    for start, end in gaps:
        if windows[0][0] <= start and end <= 2 * windows[-1][1] - windows[-1][0]:
            is_under_way = any(start < last and first < end for first, last in windows)
            found["kv" if is_under_way else "alone"].append(1000 * (end - start))
    if any(len(times) < 2 for times in found.values()):
        raise SystemExit(f"too few gaps between tokens with --runs {runs}: use more")
    percentiles = {name: statistics.quantiles(times, n=100) for name, times in found.items()}
    return {
        "handed_bytes": handed,
        **{
            f"token_gap_p{number}_{name}_ms": round(of[number - 1], 2)
            for name, of in percentiles.items()
            for number in (50, 99)
        },
    }


def handed_bytes(port: int) -> float:
    """Return the KV bytes of all hand-offs that have ended."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("pdserve_kv_handoff_bytes_total"))


def token_times(port: int, model: str, prompt: list[int], max_tokens: int) -> Iterator[float]:
    """Request a completion and yield the time of each piece of text."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "skip_special_tokens": False,
    }  # fmt: skip
    for event in stream(port, body):
        if event.get("choices") and event["choices"][0].get("text"):
            yield time.perf_counter()


def stream(port: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Post a completion and yield its events."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"port {port}: {response.status} {response.read()[:300]!r}")
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])
    connection.close()


def summary(prompt_tokens: int, times: Times, args: argparse.Namespace) -> dict[str, Any]:
    """Return medians in ms, and the hop as a share of the time to first token, by pair of requests."""
    row: dict[str, Any] = {"prompt_tokens": prompt_tokens, "runs": args.runs, "chunk": args.chunk, "cpu": cpu()}
    for i, name in enumerate(("first", "second")):
        for side in ("pd", "combined"):
            row[f"{name}_token_{side}_ms"] = round(1000 * statistics.median(t[i] for t in times[side]), 1)
    pairs = list(zip(times["pd"], times["combined"], strict=True))
    row["hop"] = round(statistics.median((pd[1] - one[1]) / one[0] for pd, one in pairs), 4)
    row["gap"] = round(statistics.median((pd[1] - pd[0] - (one[1] - one[0])) / one[0] for pd, one in pairs), 4)
    row["met"] = row["hop"] < HOP_GOAL
    return row


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the table of docs/performance.md."""
    print(
        "\n| prompt | first token P/D, combined | second token P/D, combined | hop / TTFT | gap / TTFT | goal | met |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        first = f"{row['first_token_pd_ms']:,}, {row['first_token_combined_ms']:,} ms"
        second = f"{row['second_token_pd_ms']:,}, {row['second_token_combined_ms']:,} ms"
        shares = f"{row['hop']:.1%} | {row['gap']:.1%} | < {HOP_GOAL:.0%} | {'yes' if row['met'] else 'no'}"
        print(f"| {row['prompt_tokens']:,} | {first} | {second} | {shares} |")


def model_name(port: int) -> str:
    """Return the served name."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/v1/models")
    return str(json.load(connection.getresponse())["data"][0]["id"])


def wait_ready(port: int) -> None:
    """Wait until /ready answers 200."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"port {port} was not ready within {START_S} s")


def pdserve(*arguments: str, env: dict[str, str]) -> None:
    """Run a pdserve command."""
    command = [sys.executable, "-P", "-m", "pdserve", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, env=env, stdout=subprocess.DEVNULL)


def command_output(*arguments: str) -> str:
    """Return what a pdserve command prints."""
    command = [sys.executable, "-P", "-m", "pdserve", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def end(process: "subprocess.Popen[bytes]") -> None:
    """Terminate a process; kill it after 30 s."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


if __name__ == "__main__":
    main()
