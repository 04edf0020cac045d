"""`python -P -m pdserve.bench.pd.colocated ADDRESSES FLAGS`: the scheduler over combined instances, without a table."""

import os
import sys
from collections.abc import Sequence

from native.ticker import start_ticker
from pdserve import combined
from pdserve.guarded import guarded
from pdserve.parent_death import die_with_parent
from rpc.grpc_connection import GrpcConnection
from scheduler.config import parse
from scheduler.loop import run
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.process import serve_cluster
from scheduler.serving import Cluster
from telemetry import logs
from wire.types import Role


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM."""
    return guarded("pdserve.bench.pd.colocated", lambda: _serve(argv[0].split(","), argv[1:]))


def _serve(addresses: Sequence[str], flags: Sequence[str]) -> int:
    die_with_parent(os.environ)
    config = parse(flags, os.environ)
    logs.configure(config.engine.log_level, log_format=config.engine.log_format)
    expected = tuple(
        ExpectedInstance(i, f"combined-{i}", Role.COMBINED, address, combined.HOST, combined.DEVICE_IDS)
        for i, address in enumerate(addresses)
    )
    start_ticker()
    run(serve_cluster(config, Cluster(expected, GrpcConnection)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
