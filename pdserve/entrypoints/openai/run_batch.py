"""`python -m pdserve.entrypoints.openai.run_batch -i IN -o OUT --model M` is `pdserve run-batch`."""

import os
import sys


def main(module: str = "pdserve.entrypoints.openai.run_batch") -> int:
    """Drop the current folder from the import path, then run the batch."""
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    from pdserve import run_batch
    from pdserve.guarded import guarded

    return guarded(module, lambda: run_batch.main(sys.argv[1:], ("python", "-m", module)))


if __name__ == "__main__":
    sys.exit(main())
