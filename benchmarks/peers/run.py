"""Measure each installed peer alone: JSON lines with best and median seconds and GB/s, after a verified round.

    benchmarks/peers/setup iperf3 nixl mooncake          into $PEERS_HOME
    python benchmarks/peers/run.py --sizes 1 64 256 --rounds 6

Every peer except iperf3 runs as two processes, and its first transfer of every size is checked byte by byte.
benchmarks/kv_transfer.py runs the same peers in turn with ours.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kv import peers
from benchmarks.kv.peers import Contestant
from benchmarks.kv.table import cpu

MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one peer after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 16, 64, 256], help="MiB (default: 1 16 64 256)")
    parser.add_argument("--rounds", type=int, default=6, help="default: 6")
    args = parser.parse_args(arguments)
    maximum = max(args.sizes) * MIB
    print(json.dumps({"cpu": cpu()}))
    for make in (peers.Copy, lambda _: peers.Iperf(), peers.nixl, peers.nixl_tcp, peers.mooncake):
        try:
            peer = make(maximum)
        except (peers.Missing, RuntimeError) as error:
            print(json.dumps({"skipped": str(error)}), flush=True)
            continue
        try:
            run(peer, args.sizes, args.rounds)
        finally:
            peer.close()


def run(peer: Contestant, sizes_mib: Sequence[int], rounds: int) -> None:
    """Print a line for each size."""
    for size in sizes_mib:
        peer.move(size * MIB, verify=True)
        seconds = [peer.move(size * MIB) for _ in range(rounds)]
        best, middle = min(seconds), statistics.median(seconds)
        line = {"peer": peer.name, "mib": size, "rounds": rounds, "best_s": best, "median_s": middle}
        rates = {"best_gb_s": round(size * MIB / best / 1e9, 3), "median_gb_s": round(size * MIB / middle / 1e9, 3)}
        print(json.dumps(line | rates), flush=True)


if __name__ == "__main__":
    main()
