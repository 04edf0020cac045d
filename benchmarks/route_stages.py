"""The stages of a request over vLLM workers and over our own instances, as shares of the router's CPU time.

    python benchmarks/route_stages.py --py-spy BIN/py-spy

64 streams of 2 tokens, as in the case `cost` of route.py; py-spy samples the router's process meanwhile. A sample
belongs to the stage of its innermost frame that is in the table below; the rest is the event loop and the kernel.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.front_door.servers import Server, start_child, start_ours, start_route
from benchmarks.hop import command_output
from benchmarks.route import STEP_S, streams

STAGES = {
    "tokenise": ("scheduler/tokens.py", "scheduler/tokenizer/", "scheduler/api/prompts.py"),
    "stream": (
        "scheduler/text", "scheduler/ordering.py", "scheduler/api/piece_writer.py", "scheduler/api/answer_writer.py",
        "scheduler/api/choice", "CompletionShape", "scheduler/api/generation.py", "scheduler/http/exchange.py",
    ),
    "metrics": ("scheduler/observability/", "telemetry/"),
    "place": (
        "scheduler/admission.py", "scheduler/grants.py", "scheduler/placement.py", "scheduler/load/",
        "scheduler/queue/", "scheduler/registry.py", "scheduler/readiness.py",
        "scheduler/retry_budget.py", "scheduler/dispatch.py", "scheduler/attempts.py", "scheduler/membership/",
        "placement_load (scheduler/instances.py",
    ),
    "HTTP with workers": ("scheduler/workers/http",),
    "gRPC with instances": ("rpc/", "grpc/", "wire/convert", "wire/plain"),
    "hand-off": (
        "scheduler/workers/", "scheduler/paths/", "scheduler/instances.py", "scheduler/prompt_", "scheduler/mailbox.py",
        "scheduler/wakeup.py", "scheduler/starvation.py", "wire/messages",
    ),
    "validate": (
        "scheduler/api/", "wire/check_prompt.py", "wire/types.py", "wire/parameter_rules.py", "pydantic/",
        "scheduler/request_check.py", "scheduler/request.py",
    ),
    "parse HTTP": ("scheduler/http/", "scheduler/app.py", "scheduler/api/gate.py", "starlette/"),
}  # fmt: skip
"""Part of a frame's text by stage; the longest one that matches counts."""
REST = "loop and kernel"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a JSON line for each server, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--py-spy", default="py-spy", help="path of py-spy")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of the load")
    args = parser.parse_args(arguments)
    model, found = command_output("model", "path"), {}
    for name, start in (("pdserve route", start_route), ("own instances", start_ours)):
        with ExitStack() as stack:
            lines = sample(stack, start(stack, model, [], None), args.py_spy, args.seconds)
        found[name] = shares(lines)
        print(json.dumps({"server": name, **found[name]}), flush=True)
    print(f"\n| stage | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
    for stage in (*STAGES, REST):
        print(f"| {stage} | {' | '.join(f'{one.get(stage, 0.0):.0f}%' for one in found.values())} |")


def sample(stack: ExitStack, server: Server, py_spy: str, seconds: float) -> list[str]:
    """Return py-spy's stacks of a server under load, each with its count."""
    load = start_child(stack, "paced_load")
    server.pace(STEP_S)
    streams(server, load, requests=128, concurrency=64, max_tokens=4)
    output = Path(stack.enter_context(tempfile.TemporaryDirectory()), "stacks")
    command = [py_spy, "record", "--pid", str(server.pid), "--rate", "400", "--duration", "600", "--nonblocking"]
    spy = subprocess.Popen([*command, "--format", "raw", "--output", str(output)], stdout=2, stderr=subprocess.DEVNULL)
    stack.callback(spy.kill)
    time.sleep(2.0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        streams(server, load, requests=320, concurrency=64, max_tokens=2)
    os.kill(spy.pid, signal.SIGINT)
    spy.wait(60)
    return output.read_text().splitlines()


def shares(lines: Iterable[str]) -> dict[str, float]:
    """Return each stage's share of the samples, in percent."""
    counts: Counter[str] = Counter()
    for line in lines:
        frames, _, count = line.rpartition(" ")
        counts[stage_of(frames.split(";"))] += int(count)
    return {stage: round(100 * count / counts.total(), 1) for stage, count in counts.most_common()}


def stage_of(frames: Sequence[str]) -> str:
    """Return the stage of a stack, the outermost frame first."""
    for frame in reversed(frames):
        found = [(len(part), stage) for stage, parts in STAGES.items() for part in parts if part in frame]
        if found:
            return max(found)[1]
    return REST


if __name__ == "__main__":
    main()
