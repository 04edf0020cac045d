"""`pdserve simulate`: run a trace on each layout of a cluster, with the scheduler's own code in virtual time."""

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdserve.bench.load.percentiles import percentile
from pdserve.bench.load.plot import file_of, require_plot
from pdserve.client import Client
from pdserve.flags.parser import CommandParser
from pdserve.layout_plot import draw
from pdserve.status_line import StatusLine
from pdserve.text_table import text_table
from pdserve.written_file import write_file
from simulation.cluster import Shape
from simulation.replay import Served, simulate
from simulation.trace import TraceRequest, poisson, read_trace
from wire.errors import ConfigError
from wire.step_cost import StepCost
from wire.types import Role

_LAYOUT = re.compile(r"(?:(\d+)P(\d+)D|(\d+)C)", re.IGNORECASE)
_MOST_INSTANCES, _MOST_SPLITS = 4096, 8
_SLACK = 1.1
"""A layout meets the gap limit if the p99 of its longest gaps is at most the limit times this."""
_NEAR = 0.95
"""Of the layouts with at least this share of the highest tokens/s, the one with the lowest TTFT p95 is best."""
_STREAMS_SHOWN = 8
_PLOTTED = (0.25, 0.5, 2.0, 4.0)
"""The plot also shows each layout with the gap limit times these."""
_COSTS = ("pdserve_step_base_seconds", "pdserve_step_sequence_seconds", "pdserve_step_token_seconds")
EPILOG = """\
Dispatch, queue and placement are the scheduler's own; instances are simulated: they batch and limit chunks as the
engine does, and a step takes as long as its cost says. Costs are read from a cluster that has served requests (--url),
or given (--step-cost). HTTP, text and full KV pools are not simulated. docs/simulate.md has the measured error.

  LAYOUT    nPmD: prefill and decode instances, once with every prompt handed off, once with --path auto; nC: combined
  best      exceeds the gap limit by at most a tenth, has at least 95% of the highest tokens/s, and the lowest TTFT p95

examples:
  pdserve simulate --url http://127.0.0.1:9000 --rate 3 --input-len 512 --output-len 128
  pdserve simulate --step-cost 13,0.9,1.4 --instances 8 --trace mooncake.jsonl
  pdserve simulate --url http://127.0.0.1:9000 --layout 1P3D --layout 4C --requests 200 --rate 0 --json
  pdserve simulate --step-cost 13,0.9,1.4 --instances 4 --rate 5 --plot layouts.svg
"""


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one layout: milliseconds, tokens per second, and how many requests took each path.

    `refused` requests were refused at each try; `tries` is the average per request. `in_time_per_s` counts requests
    whose first token came within `--ttft-limit`, retries included.
    """

    layout: str
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_p50_ms: float
    longest_gap_p99_ms: float
    refused: int
    tries: float
    in_time_per_s: float
    paths: dict[str, int]


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0."""
    parser = CommandParser(
        prog="pdserve simulate", description="Simulate a trace on layouts of a cluster.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    cost = parser.add_mutually_exclusive_group(required=True)
    cost.add_argument("--url", help="a scheduler whose instances have served requests: use their measured costs")
    cost.add_argument("--step-cost", metavar="B,S,T", help="ms of a step, of each sequence in it, of each prompt token")
    add_flags(parser)
    arguments = parser.parse_args(argv)
    check(arguments)
    return run(arguments, _step_cost(arguments))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the load, the layouts and the limits."""
    parser.add_argument("--trace", type=Path, help="requests in Mooncake's (JSON lines) or BurstGPT's (CSV) format")
    parser.add_argument("--requests", type=int, default=100, help="without a trace: number of requests (default: 100)")
    parser.add_argument("--rate", type=float, default=1.0, help="arrivals per second; 0: all at once (default: 1)")
    parser.add_argument("--input-len", type=int, default=512, help="prompt tokens of each request (default: 512)")
    parser.add_argument("--output-len", type=int, default=128, help="output tokens of each request (default: 128)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the arrival times (default: 0)")
    parser.add_argument("--layout", action="append", default=[], help="a layout such as 2P1D or 4C; may be repeated")
    parser.add_argument(
        "--instances", type=int, default=2, help="without --layout: all layouts of this many (default: 2)"
    )
    parser.add_argument("--gap-limit", type=float, default=0.1, help="maximum gap between tokens, in s (default: 0.1)")
    parser.add_argument(
        "--ttft-limit", type=float, default=0.0, help="scheduler's TTFT limit in s, 0: none (default: 0)"
    )
    parser.add_argument("--prefill-chunk-size", type=int, default=512, help="prompt tokens per step (default: 512)")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="sequences of an instance (default: 64)")
    parser.add_argument("--hand-off-ms", type=float, default=5.0, help="duration of a KV hand-off (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--plot", default="", help="plot tokens/s against gaps, also at other gap limits, to this .svg or .png"
    )


def run(arguments: argparse.Namespace, cost: StepCost) -> int:
    """Simulate the load on each layout and print the table; return 0."""
    trace: list[TraceRequest] = arguments.load
    shapes = _shapes(arguments, cost)
    rows, plotted = [], []
    with StatusLine() as line:
        for name, shape in shapes.items():
            line.show(f"simulating {len(trace)} requests on {name}")
            rows.append(row_of(name, simulate(shape, trace), arguments.ttft_limit or math.inf))
            for factor in _PLOTTED if arguments.plot else ():
                line.show(f"simulating {len(trace)} requests on {name} with {factor:g} times the gap limit")
                other = replace(shape, gap_limit_s=factor * shape.gap_limit_s)
                plotted.append(row_of(name, simulate(other, trace)))
    best = choose(rows, 1000 * arguments.gap_limit)
    if arguments.plot:
        figure = draw([*rows, *plotted], gap_limit_ms=1000 * arguments.gap_limit, title=f"{len(trace)} requests")
        path = Path(arguments.plot)
        write_file(path, file_of(figure, path.suffix.removeprefix(".")))
    if arguments.json:
        costs = {name: getattr(cost, name) for name in ("base_s", "sequence_s", "token_s")}
        layouts = [_as_json(row) for row in rows]
        print(json.dumps({"best": best.layout, "step_cost": costs, "layouts": layouts}, indent=2))
        return 0
    _print(rows, best)
    chunk, beside = cost.chunk_within(arguments.gap_limit, _STREAMS_SHOWN, 0), f"beside {_STREAMS_SHOWN} streams"
    if chunk < 1:
        print(f"{beside}, a step takes {cost.decode_s(_STREAMS_SHOWN):.3g} s (limit {arguments.gap_limit:g} s)")
    else:
        chunk = min(arguments.prefill_chunk_size, chunk)
        print(f"{beside}, chunks of {chunk:.0f} tokens keep gaps below {arguments.gap_limit:g} s")
    return 0


def choose(rows: Sequence[Row], gap_limit_ms: float) -> Row:
    """Return the best layout; if none meets the gap limit, the best of those whose longest gaps are shortest."""
    limit_ms = max(gap_limit_ms, min(row.longest_gap_p99_ms for row in rows))
    within = [row for row in rows if row.longest_gap_p99_ms <= _SLACK * limit_ms]
    most = max(row.tokens_per_s for row in within)
    return min((row for row in within if row.tokens_per_s >= _NEAR * most), key=lambda row: row.ttft_p95_ms)


def check(arguments: argparse.Namespace) -> None:
    """Check the flags and read the trace. Raises ConfigError."""
    for name in ("requests", "input_len", "output_len", "prefill_chunk_size", "max_num_seqs"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be at least 1")
    for name in ("rate", "hand_off_ms", "ttft_limit"):
        if not 0 <= getattr(arguments, name) < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(arguments, name):g}: must be 0 or more")
    if not arguments.gap_limit > 0:
        raise ConfigError(f"--gap-limit {arguments.gap_limit:g}: must be more than 0")
    if not 2 <= arguments.instances <= _MOST_INSTANCES:
        raise ConfigError(f"--instances {arguments.instances} is not in 2..{_MOST_INSTANCES}")
    if arguments.plot:
        require_plot(arguments.plot)
    arguments.load = _trace(arguments)


def _trace(arguments: argparse.Namespace) -> list[TraceRequest]:
    if arguments.trace is not None:
        return read_trace(arguments.trace)
    return poisson(arguments.requests, arguments.rate, arguments.input_len, arguments.output_len, arguments.seed)


def _step_cost(arguments: argparse.Namespace) -> StepCost:
    return step_cost_of(arguments.step_cost) if arguments.url is None else measured_cost(Client(arguments.url))


def step_cost_of(text: str) -> StepCost:
    """Return the cost of `13,0.9,1.4`, in ms. Raises ConfigError."""
    parts = text.split(",")
    try:
        values = [float(part) / 1000 for part in parts]
    except ValueError:
        values = []
    if len(values) != 3 or not all(0 <= value < float("inf") for value in values) or not (values[0] and values[2]):
        raise ConfigError(f"--step-cost {text} must be three times in ms, such as 13,0.9,1.4")
    return StepCost(*values)


def measured_cost(client: Client) -> StepCost:
    """Return what a cluster's steps cost: each part is the mean over the instances that have measured it."""
    samples = client.metrics()
    values = [[one.value for one in samples if one.name == name and one.value] for name in _COSTS]
    base, sequence, token = (sum(each) / len(each) if each else 0.0 for each in values)
    if not base or not token:
        what = "the time of a prompt token" if not token else "the time of a decode step"
        raise ConfigError(f"{client.base_url} has not measured {what} yet: send it some requests, or set --step-cost")
    return StepCost(base, sequence, token)


def _shapes(arguments: argparse.Namespace, cost: StepCost) -> dict[str, Shape]:
    shapes = {}
    for layout in arguments.layout or _splits(arguments.instances):
        roles = roles_of(layout)
        shape = Shape(
            roles, cost, gap_limit_s=arguments.gap_limit, prefill_chunk_size=arguments.prefill_chunk_size,
            max_num_seqs=arguments.max_num_seqs, send_s=arguments.hand_off_ms / 1000, ttft_limit_s=arguments.ttft_limit,
        )  # fmt: skip
        shapes[layout] = shape
        if Role.PREFILL in roles:
            shapes[f"{layout} auto"] = shape.comparing_paths()
    return shapes


def roles_of(layout: str) -> list[Role]:
    """Return the roles of a layout such as 2P1D or 3C. Raises ConfigError."""
    found = _LAYOUT.fullmatch(layout)
    counts = [int(group or 0) for group in found.groups()] if found else []
    if not counts or not 0 < sum(counts) <= _MOST_INSTANCES or bool(counts[0]) != bool(counts[1]):
        raise ConfigError(f"--layout {layout} is not a layout such as 2P1D or 3C, of 1 to {_MOST_INSTANCES} instances")
    roles = (Role.PREFILL, Role.DECODE, Role.COMBINED)
    return [role for role, count in zip(roles, counts, strict=True) for _ in range(count)]


def _splits(instances: int) -> list[str]:
    """Return the layouts of that many instances: up to eight splits into prefill and decode, and all combined."""
    every = max(1, -(-(instances - 1) // _MOST_SPLITS))
    return [*(f"{p}P{instances - p}D" for p in range(1, instances, every)), f"{instances}C"]


def row_of(layout: str, trace: Sequence[Served], ttft_limit_s: float = math.inf) -> Row:
    """Return the figures of a layout that served a trace; a first token within `ttft_limit_s` is in time."""
    served = [one for one in trace if one.num_tokens]
    seconds = max((one.last for one in served), default=0.0) - min(one.arrived for one in trace)
    ttft = [one.ttft_s for one in served]
    paths: dict[str, int] = {}
    for one in served:
        paths[one.path] = paths.get(one.path, 0) + 1
    return Row(
        layout,
        sum(one.num_tokens for one in served) / seconds if served else 0.0,
        1000 * percentile(ttft, 50),
        1000 * percentile(ttft, 95),
        1000 * percentile([one.tpot_s for one in served], 50),
        1000 * percentile([one.longest_gap_s for one in served], 99),
        len(trace) - len(served),
        sum(one.num_tries for one in trace) / len(trace),
        sum(one.ttft_s <= ttft_limit_s for one in served) / seconds if served else 0.0,
        paths,
    )


def _print(rows: Sequence[Row], best: Row) -> None:
    header = (
        "LAYOUT", "TOKENS/S", "TTFT P50", "TTFT P95", "TPOT P50", "LONGEST GAP P99", "REFUSED", "TRIES", "IN TIME/S",
        "PATHS",
    )  # fmt: skip
    print("\n".join(text_table(header, [_cells(row) for row in rows])))
    advice = "do not disaggregate" if best.layout.endswith("C") else "separate prefill and decode"
    print(f"best: {best.layout} ({advice})")


def _cells(row: Row) -> list[str]:
    times = (row.ttft_p50_ms, row.ttft_p95_ms, row.tpot_p50_ms, row.longest_gap_p99_ms)
    paths = ", ".join(f"{path} {count}" for path, count in sorted(row.paths.items()))
    limited = (str(row.refused), f"{row.tries:.2f}", f"{row.in_time_per_s:.2f}")
    return [row.layout, f"{row.tokens_per_s:.1f}", *(f"{time:.1f} ms" for time in times), *limited, paths]


def _as_json(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Row.__slots__}
