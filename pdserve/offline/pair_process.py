"""`python -P -m pdserve.offline.pair_process FOLDER ...`: `pdserve up` that dies with its parent process.

FOLDER is the run folder, with the cluster secret. The parent removes it; if the parent is killed, this process does.
"""

import os
import shutil
import sys
from functools import partial

from pdserve.guarded import guarded
from pdserve.parent_death import die_with_parent


def main() -> int:
    """Serve until SIGTERM, or until the parent is gone."""
    folder = sys.argv[1]
    die_with_parent(os.environ, partial(shutil.rmtree, folder, ignore_errors=True))

    def up() -> int:
        from pdserve.up import main as run_up

        return run_up(["--run-dir", folder, *sys.argv[2:]])

    return guarded("pdserve up", up)


if __name__ == "__main__":
    sys.exit(main())
