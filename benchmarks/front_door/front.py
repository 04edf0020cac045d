"""The real scheduler process that `benchmarks/frontdoor.py` measures, with instances at given ports.

python benchmarks/front_door/front.py --prefill PORT --decode PORT [--profile FILE] [flags of the scheduler]
"""

import argparse
import cProfile
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.front_door.addresses import DEVICE_IDS, HOST, ROLES
from rpc.grpc_connection import GrpcConnection
from scheduler.config import SchedulerConfig, parse
from scheduler.loop import run as run_loop
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.process import serve_cluster
from scheduler.serving import Cluster
from telemetry import logs


def main() -> None:
    """Serve until SIGTERM; with --profile, write a profile of the event loop's thread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True, type=int)
    parser.add_argument("--decode", required=True, type=int)
    parser.add_argument("--profile", help="write cProfile's figures to this file")
    args, flags = parser.parse_known_args()
    config = parse(flags)
    logs.configure(config.engine.log_level)
    ports = (args.prefill, args.decode)
    expected = tuple(
        ExpectedInstance(index, f"{role}-0", role, f"{HOST}:{port}", HOST, DEVICE_IDS[role])
        for index, (role, port) in enumerate(zip(ROLES, ports, strict=True))
    )
    if args.profile is None:
        run(config, expected)
        return
    profile = cProfile.Profile(time.thread_time)  # only this thread's CPU time, without that of other processes
    try:
        profile.runcall(run, config, expected)
    finally:
        profile.dump_stats(args.profile)


def run(config: SchedulerConfig, expected: tuple[ExpectedInstance, ...]) -> None:
    """Serve as the scheduler's own process does."""
    run_loop(serve_cluster(config, Cluster(expected, GrpcConnection)))


if __name__ == "__main__":
    main()
