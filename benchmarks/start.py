"""Seconds from `pdserve up --detach` or `pdserve route` to the first answer, or from `kill -9` to the next one.

    python benchmarks/start.py --runs 3
    python benchmarks/start.py --model MODEL --prefill 2 --decode 2
    python benchmarks/start.py --route 1 1 --runs 3                      over test doubles of vLLM workers
    python benchmarks/start.py --replace decode-0 prefill-0 --runs 3     also with --no-spare

Each run starts a cluster, requests one token, and stops it. The stages are read from the processes' log lines, in
seconds after the command's start; the slowest instance counts. With --route the given numbers of prefill and decode
doubles are already running, and the CPU seconds are those of all processes of `pdserve route`. With --replace each
named instance is killed once the spare is warm; the phases are the supervisor's (docs/operations.md), with the CPU
seconds of the new process in each phase, since these do not depend on other load. JSON: one line per measurement with
the machine's load, then the medians.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.hop import command_output

START_S, ANSWER_S, POLL_S = 300, 60, 0.05
PORT = 9300
STAMP = re.compile(r"^(\S+Z) \S+ \S+ (\S+)")


def main() -> None:
    """Run, print, and summarise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", help="folder of the model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument(
        "--replace", nargs="+", default=[], metavar="NAME", help="kill these processes and time their replacement"
    )
    parser.add_argument("--no-spare", action="store_true", help="with --replace: use new processes")
    parser.add_argument("--route", type=int, nargs=2, metavar=("PREFILL", "DECODE"), help="start `pdserve route`")
    args = parser.parse_args()
    if args.route:
        model = args.model or command_output("model", "path")
        summarise("route", [measure_route(model, *args.route) for _ in range(args.runs)])
        return
    flags = ["--prefill", str(args.prefill), "--decode", str(args.decode)]
    flags += ["--model", args.model] if args.model else []
    flags += ["--no-spare"] if args.no_spare else []
    if not args.replace:
        summarise("start", [measure(flags) for _ in range(args.runs)])
        return
    runs = [replace(flags, args.replace, is_warm=not args.no_spare) for _ in range(args.runs)]
    for place, name in enumerate(args.replace):
        summarise(f"replace {name}", [rows[place] for rows in runs])


def summarise(what: str, rows: Sequence[dict[str, float]]) -> None:
    """Print the medians of the rows."""
    medians = {key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0]}
    print(json.dumps({"measure": what, "runs": len(rows), "cores": len(os.sched_getaffinity(0)), **medians}))


def replace(flags: Sequence[str], names: Sequence[str], *, is_warm: bool) -> list[dict[str, float]]:
    """Start a cluster and kill each of its processes `names`; return a row of seconds for each."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PDSERVE_RUN_DIR": folder}
        state = Path(folder) / "state.json"
        try:
            pdserve("up", "--detach", "--port", str(PORT), *flags, env=env)
            ask()
            return [replaced(name, state, is_warm=is_warm) for name in names]
        finally:
            pdserve("down", env=env)


def replaced(name: str, state: Path, *, is_warm: bool) -> dict[str, float]:
    """Kill one process; return the seconds until a request is answered, and those of each phase."""
    wait(lambda: not is_warm or json.loads(state.read_text())["spare"]["note"] == "warm")
    load, began = os.getloadavg()[0], time.monotonic()
    os.kill(record(state, name)["pid"], signal.SIGKILL)
    wait(lambda: record(state, name)["restarts"] > 0 and answers())
    row = {"answers_again": time.monotonic() - began, "load": load}
    wait(lambda: [phase[0] for phase in record(state, name)["phases"]][-1:] == ["serving"])
    phases = record(state, name)["phases"]
    row["serves_again"] = sum(seconds for _, seconds, _ in phases)
    for phase, seconds, cpu_s in phases:
        row |= {f"{phase}_s": seconds, f"{phase}_cpu_s": cpu_s}
    row = {key: round(value, 2) for key, value in row.items()}
    print(json.dumps({"replaced": name, **row}), flush=True)
    return row


def record(state: Path, name: str) -> dict[str, Any]:
    """Return a process's record in the run folder."""
    return next(one for one in json.loads(state.read_text())["processes"] if one["name"] == name)


def answers() -> bool:
    """Return whether a request is answered now."""
    try:
        ask()
    except OSError:  # no connection, or a 503
        return False
    return True


def wait(condition: Callable[[], bool]) -> None:
    """Return when the condition holds. Raises TimeoutError after START_S."""
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the condition did not hold within {START_S} s")
        time.sleep(POLL_S)


def measure(flags: Sequence[str]) -> dict[str, float]:
    """Start a cluster, send one request, stop it; return the seconds from the start to each stage."""
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


def measure_route(model: str, num_prefill: int, num_decode: int) -> dict[str, float]:
    """Start `pdserve route` in front of doubles, and stop it; return the seconds to its first answer."""
    settings = json.dumps({"model": model, "fake": {"vocab_size": 40_000, "max_model_len": 2048}})
    double = [sys.executable, "-P", "-m", "testing.vllm_worker", "--settings", settings]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        doubles = [
            subprocess.Popen(double, env=env, stdout=subprocess.PIPE, text=True)
            for _ in range(num_prefill + num_decode)
        ]
        for one in doubles:
            stack.callback(one.kill)
        urls = [one.stdout.readline().strip() for one in doubles if one.stdout is not None]
        command = [sys.executable, "-P", "-m", "pdserve", "route", "--prefill", *urls[:num_prefill]]
        command += ["--decode", *urls[num_prefill:], "--port", str(PORT), "--run-dir", folder]
        load, began = os.getloadavg()[0], time.monotonic()
        route = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            wait(answers)
            row = {"first_answer": time.monotonic() - began, "cpu_s": cpu_s(route.pid), "load": load}
        finally:
            route.send_signal(signal.SIGINT)
            route.wait(START_S)
    row = {key: round(value, 2) for key, value in row.items()}
    print(json.dumps(row), flush=True)
    return row


def cpu_s(session: int) -> float:
    """Return the CPU seconds of a session's processes, with those of their children that have ended."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(") ")[2].split()
            ticks += sum(map(int, fields[11:15])) if int(fields[3]) == session else 0
    return ticks / os.sysconf("SC_CLK_TCK")


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
    """Request one token."""
    base = f"http://127.0.0.1:{PORT}/v1"
    proxyless = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with proxyless.open(f"{base}/models", timeout=ANSWER_S) as reply:
        model = json.load(reply)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{base}/completions", body, {"Content-Type": "application/json"})
    with proxyless.open(request, timeout=ANSWER_S) as reply:
        assert json.load(reply)["choices"], "an answer without choices"


def pdserve(*arguments: str, env: dict[str, str]) -> None:
    """Run a pdserve command."""
    command = [sys.executable, "-P", "-m", "pdserve", *arguments]
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, timeout=START_S)


if __name__ == "__main__":
    main()
