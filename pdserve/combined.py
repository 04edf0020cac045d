"""`python -P -m pdserve.combined`: one combined instance over gRPC, without a table, for `verify` and `bench pd`."""

import os
import sys
from collections.abc import Sequence

from pdserve.guarded import guarded
from pdserve.instance_flags import parse_instance_flags
from pdserve.parent_death import die_with_parent
from telemetry import logs
from wire.types import Role

HOST = "127.0.0.1"
DEVICE_IDS = ("0",)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded("pdserve.combined", lambda: _serve(arguments))


def _serve(argv: Sequence[str]) -> int:
    die_with_parent(os.environ)
    from instance import process
    from instance.config import InstanceConfig

    typed = parse_instance_flags(argv, os.environ)
    for notice in typed.notices:
        print(notice, flush=True)
    options = typed.options
    logs.configure(options.log_level, log_format=options.log_format)
    config = InstanceConfig(options, Role.COMBINED, server_ip=HOST, device_ids=DEVICE_IDS, table_port=options.port)
    return process.run(config)


if __name__ == "__main__":
    sys.exit(main())
