"""Seconds from `pdserve up --detach` to the first answer, and where they go.

    python benchmarks/start.py --runs 3
    python benchmarks/start.py --model MODEL --prefill 2 --decode 2

Each run starts a cluster, asks for one token, and stops it. The stages come from the processes' own log lines, in
seconds from the command's start; the slowest instance counts. JSON: one line a run, then the medians.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

START_S, ANSWER_S = 300, 60
PORT = 9300
STAMP = re.compile(r"^(\S+Z) \S+ \S+ (\S+)")


def main() -> None:
    """Run, print, and summarise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", help="folder of the model (default: the default model)")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    args = parser.parse_args()
    flags = ["--prefill", str(args.prefill), "--decode", str(args.decode)]
    flags += ["--model", args.model] if args.model else []
    rows = [measure(flags) for _ in range(args.runs)]
    medians = {key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0]}
    print(json.dumps({"measure": "start", "runs": args.runs, "cores": len(os.sched_getaffinity(0)), **medians}))


def measure(flags: Sequence[str]) -> dict[str, float]:
    """Start a cluster, ask it once, stop it; return seconds from the start to each stage."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PDSERVE_RUN_DIR": folder}
        began = time.time()
        try:
            pdserve("up", "--detach", "--port", str(PORT), *flags, env=env)
            ready_s = time.time() - began
            ask()
            answer_s = time.time() - began
            row = {**stages(Path(folder) / "logs", began), "up_returns": ready_s, "first_answer": answer_s}
        finally:
            pdserve("down", env=env)
    row = {key: round(value, 2) for key, value in row.items()}
    print(json.dumps(row), flush=True)
    return row


def stages(logs: Path, began: float) -> dict[str, float]:
    """Return when the scheduler listened, the last instance had loaded and could serve, and the cluster was ready."""
    events: dict[str, float] = {}
    load_s = 0.0
    for log in logs.glob("*.log"):
        for line in log.read_text(encoding="utf-8").splitlines():
            found = STAMP.match(line)
            if found is None:
                continue
            at = datetime.fromisoformat(found[1]).astimezone(UTC).timestamp() - began
            events[found[2]] = max(at, events.get(found[2], 0.0))
            if found[2] == "serving":
                load_s = max(load_s, float(line.rpartition("load_s=")[2]))
    return {
        "scheduler_listens": events["listening"],
        "last_instance_begins_to_load": events["serving"] - load_s,
        "last_instance_serves": events["serving"],
        "ready": events["ready"],
    }


def ask() -> None:
    """Ask for one token."""
    base = f"http://127.0.0.1:{PORT}/v1"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{base}/models", timeout=ANSWER_S) as reply:
        model = json.load(reply)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{base}/completions", body, {"Content-Type": "application/json"})
    with opener.open(request, timeout=ANSWER_S) as reply:
        assert json.load(reply)["choices"], "an answer without choices"


def pdserve(*arguments: str, env: dict[str, str]) -> None:
    """Run a pdserve command."""
    command = [sys.executable, "-P", "-m", "pdserve", *arguments]
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, timeout=START_S)


if __name__ == "__main__":
    main()
