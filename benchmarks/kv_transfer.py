"""The speed of KV transfer between two processes, with copies, iperf3, NIXL and Mooncake in the same run.

    python benchmarks/kv_transfer.py                                  everything, one table (.venv's python)
    python benchmarks/kv_transfer.py --transports shm --parts speed --sizes 64 256
    python benchmarks/kv_transfer.py --profile                        profiles of hand-offs, on both sides
    python benchmarks/kv_transfer.py --quick                          a smoke run: small, few rounds, goals mean little

Peers come from benchmarks/peers/setup ($PEERS_HOME); a missing peer is a row that says so. Contestants take turns,
on cold caches; a figure is the median of the rounds, a ratio the median of the rounds' ratios. A hand-off runs from the
first put to the ack, on P's clock; `reserve to ack` starts at the request for D's ticket (over a Unix socket).
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kv.patterns import (
    SCATTERED_BLOCKS,
    SMALL_LIMIT_MS,
    SMALL_TOKENS,
    measure_many,
    measure_pairs,
    measure_scattered,
    measure_small,
)
from benchmarks.kv.profile import profile_loads, profile_small
from benchmarks.kv.rounds import Cache, print_progress
from benchmarks.kv.shapes import MIB
from benchmarks.kv.speed import measure_speed
from benchmarks.kv.table import Row, cpu, document, markdown
from benchmarks.kv.whole import measure_whole
from wire.errors import PdserveError

PARTS = ("speed", "scattered", "many", "small", "whole", "pairs")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--transports", nargs="+", default=["shm", "tcp"], help="transports of KvSender (default: shm tcp)"
    )
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="what to measure (default: all)")
    parser.add_argument("--sizes", nargs="+", type=int, help="MiB (default: 1 16 64 256 1024)")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison (default: 7)")
    parser.add_argument("--profile", action="store_true", help="profile instead of measuring")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    args = parser.parse_args(arguments)
    args.sizes = args.sizes or ([1, 16] if args.quick else [1, 16, 64, 256, 1024])
    args.rounds = args.rounds or (2 if args.quick else 7)
    return args


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    """Measure every part of every transport."""
    quick = args.quick
    cache = Cache(32 * MIB) if quick else Cache()
    for transport in args.transports:
        parts: dict[str, Callable[[str], Iterable[Row]]] = {
            "speed": lambda name: measure_speed(name, args.sizes, args.rounds, cache),
            "scattered": lambda name: measure_scattered(name, 64 if quick else SCATTERED_BLOCKS, args.rounds, cache),
            "many": lambda name: measure_many(name, 1 if quick else 16, args.rounds, cache),
            "small": lambda name: measure_small(name, 20 if quick else 300, 8 * MIB if quick else None),
            "whole": lambda name: measure_whole(name, SMALL_TOKENS, 20 if quick else 300, SMALL_LIMIT_MS.get(name)),
            "pairs": lambda name: measure_pairs(
                name, 1 if quick else args.rounds, 0.3 if quick else 3.0, 16 * MIB if quick else None
            ),
        }
        for part in args.parts:
            try:
                yield from parts[part](transport)
            except (
                RuntimeError,
                OSError,
                PdserveError,
            ) as error:  # the other transports still get their rows
                print_progress(f"{transport}, {part}: {error}")
                yield Row(f"{transport}, {part}", skipped=" ".join(str(error).split()))


def profile(args: argparse.Namespace) -> None:
    """Print the profiles."""
    for transport in args.transports:
        for line in profile_loads(transport, args.sizes, args.rounds, (64 if args.quick else 2048) * MIB):
            print(line)
        for line in profile_small(transport, 50 if args.quick else 500):
            print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure or profile, and print."""
    args = parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that started processes are stopped
    print(f"CPU: {cpu()}; rounds: {args.rounds}; sizes: {args.sizes} MiB")
    if args.profile:
        profile(args)
        return
    began, rows = time.monotonic(), []
    for row in rows_of(args):
        rows.append(row)
        print_progress(" ".join(cell for cell in row.cells() if cell))
    print(markdown(rows))
    print_progress(f"rows: {len(rows)}, in {time.monotonic() - began:.0f} s")
    if args.json:
        text = json.dumps(
            document(rows, cpu=cpu(), rounds=args.rounds, sizes_mib=args.sizes, quick=args.quick), indent=1
        )
        Path(args.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
