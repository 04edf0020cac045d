"""`python -m pdserve` is the `pdserve` command."""

import os
import sys


def main() -> int:
    """Drop the current folder from the import path, then run the command line."""
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    from pdserve.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
