"""`python -m pdserve.entrypoints.openai.api_server --model M` is `pdserve serve M`."""

import os
import sys


def main() -> int:
    """Drop the current folder from the import path, then serve."""
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    from pdserve import serve
    from pdserve.guarded import guarded

    return guarded("pdserve.entrypoints.openai.api_server", lambda: serve.main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
