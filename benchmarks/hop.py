"""What the KV hop costs a client: a P/D pair beside one combined instance, each engine on one core, in turn.

    python benchmarks/hop.py --prompt-tokens 512 --runs 20

Both answer the same prompts; requests alternate, so a noisy machine disturbs both alike. Printed: median time to the
first and to the second token of each, and their ratios. Goals: first token at most 5% above, second at most 10% above.
"""

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_S = 120


def main() -> None:
    """Start both, measure in turn, stop both, print one JSON line and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="length of each prompt (default: 512)")
    parser.add_argument("--runs", type=int, default=20, help="requests to each (default: 20)")
    parser.add_argument("--chunk", type=int, default=512, help="--prefill-chunk-size of every engine (default: 512)")
    parser.add_argument("--dtype", default="auto", help="of every engine (default: auto)")
    parser.add_argument("--transport", help="shm or tcp (default: the best)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_folder = {**os.environ, "PDSERVE_RUN_DIR": str(Path(folder) / "pd")}
        common = ["--dtype", args.dtype, "--prefill-chunk-size", str(args.chunk)]
        pair = [*common, "--kv-transport", args.transport] if args.transport else common
        pdserve("up", "--detach", "--port", "9100", *pair, env=run_folder)
        core = str(min(os.sched_getaffinity(0)))
        model = subprocess.run(
            [sys.executable, "-P", "-m", "pdserve", "model", "path"], check=True, capture_output=True, text=True
        ).stdout.strip()
        command = ["taskset", "-c", core, sys.executable, "-P", "-m", "pdserve", "serve", model, "--port", "9101"]
        combined = subprocess.Popen([*command, *common], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_ready(9101)
            report(measure(args.prompt_tokens, args.runs), args)
        finally:
            combined.terminate()
            combined.wait(timeout=30)
            pdserve("down", env=run_folder)


def measure(prompt_tokens: int, runs: int) -> dict[str, list[tuple[float, float]]]:
    """Return (first token s, second token s) of each request to each side, warm-up left out."""
    rng, models = random.Random(1), {port: model_name(port) for port in (9100, 9101)}
    times: dict[str, list[tuple[float, float]]] = {"pd": [], "combined": []}
    for index in range(runs + 2):
        prompt = [rng.randrange(1000, 40000) for _ in range(prompt_tokens)]
        for name, port in (("pd", 9100), ("combined", 9101)):
            first_and_second = two_tokens(port, models[port], prompt)
            if index >= 2:
                times[name].append(first_and_second)
    return times


def two_tokens(port: int, model: str, prompt: list[int]) -> tuple[float, float]:
    """Ask for a few tokens and return when the first two pieces of text came, in seconds from sending."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True,
        "skip_special_tokens": False,
    }  # fmt: skip
    began, arrivals = time.perf_counter(), []
    for event in stream(port, body):
        if event.get("choices") and event["choices"][0].get("text"):
            arrivals.append(time.perf_counter() - began)
    return arrivals[0], arrivals[1]


def stream(port: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Post a completion and yield its events."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"port {port}: {response.status} {response.read()[:300]!r}")
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])
    connection.close()


def report(times: dict[str, list[tuple[float, float]]], args: argparse.Namespace) -> None:
    """Print medians in ms and ratios pair by pair."""
    row: dict[str, Any] = {"prompt_tokens": args.prompt_tokens, "runs": args.runs, "chunk": args.chunk, "cpu": cpu()}
    for i, name in enumerate(("first", "second")):
        for side in ("pd", "combined"):
            row[f"{name}_token_{side}_ms"] = round(1000 * statistics.median(t[i] for t in times[side]), 1)
        ratios = [a[i] / b[i] for a, b in zip(times["pd"], times["combined"], strict=True)]
        row[f"{name}_token_ratio"] = round(statistics.median(ratios), 3)
    print(json.dumps(row))


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
    subprocess.run([sys.executable, "-P", "-m", "pdserve", *arguments], check=True, env=env, stdout=subprocess.DEVNULL)


def cpu() -> str:
    """Return the CPU's name and how many cores this process may use."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {len(os.sched_getaffinity(0))} cores"


if __name__ == "__main__":
    main()
