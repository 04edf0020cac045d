"""`python -P -m pdserve.offline.pair_process FOLDER ...`: `pdserve up` that ends with the process which started it.

FOLDER is the run folder. It is that process's to remove; where it was killed it is removed here, with the secret in it.
"""

import os
import shutil
import sys
from functools import partial

from pdserve.cli import guarded
from pdserve.tether import hold_on


def main() -> int:
    """Serve until SIGTERM, or until the parent is gone."""
    folder = sys.argv[1]
    hold_on(os.environ, partial(shutil.rmtree, folder, ignore_errors=True))

    def up() -> int:
        from pdserve.up import main as run_up

        return run_up(["--run-dir", folder, *sys.argv[2:]])

    return guarded("pdserve up", up)


if __name__ == "__main__":
    sys.exit(main())
