"""`python -P -m pdserve.offline.pair_process`: `pdserve up` that ends with the process which started it."""

import os
import sys

from pdserve.cli import guarded
from pdserve.tether import hold_on


def main() -> int:
    """Serve until SIGTERM, or until the parent is gone."""
    hold_on(os.environ)

    def up() -> int:
        from pdserve.up import main as run_up

        return run_up(sys.argv[1:])

    return guarded("pdserve up", up)


if __name__ == "__main__":
    sys.exit(main())
