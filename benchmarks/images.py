"""Images beside running streams: a burst of images to a P/D pair, and the same burst as text of as many tokens.

    python benchmarks/images.py                    8 images of 1024 x 1024, a tower of 400M before a text model of 0.5B
    python benchmarks/images.py --shape small      takes minutes on two cores
    python benchmarks/images.py --flags "--dtype float32 --kv-cache-memory 1GiB"

The model is written with random weights (vision/shapes.py) and served by `pdserve up`, one P and one D. Each round runs
8 streams and, once all of them have tokens, a burst: 8 chats of one image each, or 8 prompts of as many random tokens.
The kinds take turns, so a noisy machine disturbs both alike.

    gap       the longest gap between two tokens of a stream, from the burst's start to the end of its last answer:
              p50 and p99 over streams and rounds                              goal: images at most 1.1 x text
    turn      the longest turn of each process's event loop in bursts of images: its CPU time (goal: 20 ms), its length
              without waits for a core, and its length; if the machine has other work, only the CPU time is reliable
    overlap   the share of P's computing time, in bursts of images, in which its image encoder computes too, sampled
              every 50 ms by CPU time; at most 7/8 for 8 images, since one encoder encodes them in turn
"""

import argparse
import base64
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.front_door.cpu import cpu_by_thread, cpu_s
from benchmarks.hop import free_ports, model_name, start_pd, token_times
from benchmarks.kv.table import cpu
from benchmarks.loop_lag.read import Span, longest_turn_ms, recording
from benchmarks.vision.shapes import SHAPES, png, write_vision_model
from pdserve.run_folder import RunFolder

KINDS = ("images", "text")
GAP_GOAL, TURN_GOAL_MS = 1.1, 20.0
BURST_S, SAMPLE_S, BUSY_SHARE = 1800.0, 0.05, 0.05
OUTPUT_TOKENS = 4


@dataclass(slots=True)
class Found:
    """What the bursts of one kind showed: the longest gap of each stream, time to each answer, and when they ran."""

    gaps_s: list[float] = field(default_factory=list)
    answers_s: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    samples: list[tuple[bool, bool]] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Write the model, start the pair, measure, stop it; print one JSON line and a table."""
    args = parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the stack stops started processes
    (port,) = free_ports(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="images-", dir=args.folder)))
        args.model = str(folder / args.shape)
        args.flags += f" --first-token-timeout {BURST_S:g} --image-timeout {BURST_S:g}"
        write_vision_model(SHAPES[args.shape], Path(args.model))
        os.environ |= recording(folder)
        start_pd(stack, port, args, str(folder))
        state = RunFolder(folder / "pd").read()
        assert state is not None
        pids = {one.name: one.pid for one in state.living()}
        found = measure(port, pids["prefill-0"], args)
        turns = {name: longest_turn_ms(folder, pid, found["images"].spans) for name, pid in pids.items()}
    row = summary(found, turns, args)
    print(json.dumps(row), flush=True)
    print_table(row)
    return row


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; `flags_of` and `start_pd` read the same names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="400m", choices=SHAPES, help="shape of the model (default: 400m)")
    parser.add_argument("--rounds", type=int, default=3, help="bursts of each kind (default: 3)")
    parser.add_argument("--images", type=int, default=8, help="images in a burst (default: 8)")
    parser.add_argument("--side", type=int, default=1024, help="pixels of an image's side (default: 1024)")
    parser.add_argument("--streams", type=int, default=8, help="streams beside a burst (default: 8)")
    parser.add_argument("--stream-tokens", type=int, default=8192, help="maximum tokens of a stream (default: 8192)")
    parser.add_argument("--chunk", type=int, default=512, help="--prefill-chunk-size (default: 512)")
    parser.add_argument("--dtype", default="auto", help="dtype of every engine (default: auto)")
    parser.add_argument("--transport", help="a --kv-transport of the pair (default: the pair chooses)")
    parser.add_argument("--folder", help="where the model is written, for the run (default: the temporary folder)")
    parser.add_argument("--flags", default="", help="more flags of every process, such as '--device cuda'")
    return argparse.Namespace(engine="torch", **vars(parser.parse_args(arguments)))


def measure(port: int, prefill_pid: int, args: argparse.Namespace) -> dict[str, Found]:
    """Run the bursts, both kinds in turn; the first of each warms up and is not counted."""
    found: dict[str, Found] = {}
    model, seeds = model_name(port), itertools.count()
    (encoder_pid,) = children(prefill_pid, "engine.vision.child")
    for index in range(args.rounds + 1):
        for kind in KINDS if index % 2 else reversed(KINDS):
            one = found.setdefault(kind, Found()) if index else Found()
            bodies = [body_of(kind, model, next(seeds), args) for _ in range(args.images)]
            with streams(port, model, args) as arrivals, sampled(prefill_pid, encoder_pid, one.samples):
                began = time.monotonic()
                with ThreadPoolExecutor(args.images) as pool:
                    one.answers_s += pool.map(lambda body: post(port, *body), bodies)
                one.spans.append((began, time.monotonic()))
            one.gaps_s += [longest_gap(times, one.spans[-1]) for times in arrivals]
            shown = f"streams: {len(arrivals)}, longest gap {1000 * max(one.gaps_s[-len(arrivals) :]):.0f} ms"
            took_s = one.spans[-1][1] - began
            print(f"images: {kind} {index} of {args.rounds} took {took_s:.1f} s, {shown}", file=sys.stderr, flush=True)
    return found


def children(pid: int, module: str) -> list[int]:
    """Return the children of a process that run a module."""
    found = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [child for child in found if module in Path(f"/proc/{child}/cmdline").read_text().split("\0")]


def body_of(kind: str, model: str, seed: int, args: argparse.Namespace) -> tuple[str, bytes]:
    """Return the path and body of a request: an image that no other request has, or as many random tokens."""
    shape, common = SHAPES[args.shape], {"model": model, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    if kind == "text":
        rng = random.Random(seed)
        prompt = [rng.randrange(3, shape.vocab_size - 1) for _ in range(shape.image_tokens + 1)]
        return "/v1/completions", json.dumps({**common, "prompt": prompt}).encode()
    url = f"data:image/png;base64,{base64.b64encode(png(args.side, seed)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": f"w{seed + 3}"}]
    body = {**common, "messages": [{"role": "user", "content": parts}]}
    return "/v1/chat/completions", json.dumps(body).encode()


def post(port: int, path: str, body: bytes) -> float:
    """Send a request; return the seconds until it is answered."""
    began = time.monotonic()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=BURST_S) as response:
        response.read()
    return time.monotonic() - began


@contextmanager
def streams(port: int, model: str, args: argparse.Namespace) -> Any:
    """Run streams for a `with` block, which begins when all of them have tokens; yield the times of their tokens."""
    arrivals: list[list[float]] = [[] for _ in range(args.streams)]
    over, running = threading.Event(), threading.Barrier(args.streams + 1)

    def decode(number: int) -> None:
        prompt = [number % 100 + 3] * 16
        for _ in token_times(port, model, prompt, args.stream_tokens):
            arrivals[number].append(time.monotonic())
            if len(arrivals[number]) == 2:
                running.wait(BURST_S)
            if over.is_set():
                return
        raise SystemExit(f"a stream ended before the burst: use more --stream-tokens than {args.stream_tokens}")

    with ThreadPoolExecutor(args.streams) as pool:
        tasks = [pool.submit(decode, number) for number in range(args.streams)]
        try:
            running.wait(BURST_S)
            yield arrivals
        finally:
            over.set()
            running.abort()
        for task in tasks:
            task.result()


def longest_gap(times: Sequence[float], span: Span) -> float:
    """Return the longest gap between two tokens that overlaps the span."""
    return max(later - sooner for sooner, later in itertools.pairwise(times) if later > span[0] and sooner < span[1])


@contextmanager
def sampled(prefill_pid: int, encoder_pid: int, samples: list[tuple[bool, bool]]) -> Any:
    """Append, every SAMPLE_S, whether P computes and whether its encoder does."""
    over = threading.Event()

    def run() -> None:
        before = None
        while not over.wait(SAMPLE_S):
            computing = sum(spent for name, spent in cpu_by_thread(prefill_pid).items() if name != "loop")
            now = (computing, cpu_s(encoder_pid))
            if before is not None:
                prefills, encodes = (b - a > BUSY_SHARE * SAMPLE_S for a, b in zip(before, now, strict=True))
                samples.append((prefills, encodes))
            before = now

    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(run)
        try:
            yield
        finally:
            over.set()
        task.result()


def summary(
    found: dict[str, Found], turns: dict[str, dict[str, float]], args: argparse.Namespace
) -> dict[str, Any]:  # fmt: skip
    """Return the row of the run."""
    shape = SHAPES[args.shape]
    row: dict[str, Any] = {
        "shape": args.shape, "images": args.images, "side": args.side, "streams": args.streams, "rounds": args.rounds,
        "tokens_each": shape.image_tokens, "cpu": cpu(), "load": os.getloadavg()[0],
    }  # fmt: skip
    for kind, one in found.items():
        row |= {
            f"gap_p50_{kind}_ms": percentile_ms(one.gaps_s, 50), f"gap_p99_{kind}_ms": percentile_ms(one.gaps_s, 99),
            f"answer_p50_{kind}_ms": percentile_ms(one.answers_s, 50),
            f"burst_{kind}_s": round(statistics.median(end - start for start, end in one.spans), 2),
        }  # fmt: skip
    samples = found["images"].samples
    prefills = [encodes for prefill, encodes in samples if prefill]
    row["overlap"] = round(sum(prefills) / max(1, len(prefills)), 3)
    row["ratio_p50"], row["ratio_p99"] = (
        round(row[f"gap_{percent}_images_ms"] / row[f"gap_{percent}_text_ms"], 3) for percent in ("p50", "p99")
    )
    row["turns_ms"] = turns
    row["met"] = {
        "gap": row["ratio_p99"] <= GAP_GOAL, "turn": all(one["cpu"] <= TURN_GOAL_MS for one in turns.values()),
    }  # fmt: skip
    return row


def percentile_ms(seconds: Sequence[float], percent: int) -> float:
    """Return a percentile in ms."""
    ordered = [1000 * one for one in seconds]
    return round(statistics.quantiles(ordered, n=100, method="inclusive")[percent - 1], 2)


def print_table(row: dict[str, Any]) -> None:
    """Print the table of docs/performance.md."""
    print("\n| longest gap of a stream | images | text | ratio | goal |\n|---|---|---|---|---|")
    for percent in ("p50", "p99"):
        images, text = (f"{row[f'gap_{percent}_{kind}_ms']:,.0f} ms" for kind in KINDS)
        goal = f"<= {GAP_GOAL}" if percent == "p99" else ""
        print(f"| {percent} | {images} | {text} | {row[f'ratio_{percent}']:.2f} | {goal} |")
    print("\n| longest turn of a loop | CPU time | without waits for a core | whole | goal |\n|---|---|---|---|---|")
    for name, turn in row["turns_ms"].items():
        print(f"| {name} | {' | '.join(f'{one:.1f} ms' for one in turn.values())} | CPU <= {TURN_GOAL_MS:g} ms |")
    print(f"\nimages are encoded during {row['overlap']:.0%} of P's computing time; load {row['load']:.1f}")


if __name__ == "__main__":
    main()
