"""Stands in for engine/kernel_child.py, without torch: does what its parameters say, and records that it ran.

python -P -m tests.engine.fake_kernel_child     (PYTHONPATH: the repository)
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    params = json.load(sys.stdin)["params"]
    with Path(params["ran"]).open("a") as file:
        file.write("x")
    what = params["do"]
    if what == "hangs":
        time.sleep(3600)
    if what == "dies":
        sys.stderr.write("CUDA error: an illegal memory access was encountered\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "not here":
        sys.stderr.write("warning\nRuntimeError: the device is busy or unavailable\n")
        return 3
    answers = {"good": '{"why": null}', "wrong": '{"why": "largest difference 3"}', "babbles": "done", "lies": "[1]"}
    print(f"a library says hello\n{answers[what]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
