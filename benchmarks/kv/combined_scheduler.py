"""A scheduler and one combined instance in separate processes, like the scheduler, P and D of a cluster.

    python benchmarks/kv/combined_scheduler.py --instance 127.0.0.1:9102 --port 9101 [flags of pdserve serve]

`pdserve serve` runs both in one process: its scheduler would share the engine's core, an unfair comparison.
"""

import argparse
import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pdserve import combined
from pdserve.serve import parse
from rpc.grpc_connection import GrpcConnection
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.process import Cluster, serve_cluster
from telemetry import logs
from wire.types import Role


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instance", required=True, help="host:port of `python -P -m pdserve.combined`")
    args, flags = parser.parse_known_args()
    config = parse(flags)
    logs.configure(config.engine.log_level)
    expected = ExpectedInstance(0, "combined-0", Role.COMBINED, args.instance, combined.HOST, combined.DEVICE_IDS)
    asyncio.run(serve_cluster(config, Cluster((expected,), GrpcConnection)))


if __name__ == "__main__":
    main()
