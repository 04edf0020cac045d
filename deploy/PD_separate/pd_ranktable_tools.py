#!/usr/bin/env python3
"""The guide's ranktable tool, run from the clone with only the standard library: --mode gen|merge|merge-local."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)
    from pdserve.guide_command import main

    raise SystemExit(main())
