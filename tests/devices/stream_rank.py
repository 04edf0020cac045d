"""A rank process on the fake device with a stream (stream.py).

python -P -m tests.devices.stream_rank CHANNEL_FD PARENT_PID     (PYTHONPATH: the repository)
"""

import os
import sys

from devices import table
from devices.collectives import COLLECTIVES
from instance.rank_process import main
from tests.devices.stream import STREAM, StreamKind, stream_collective

PROGRAM = "tests.devices.stream_rank"
COLLECTIVE, FAULT = "STREAM_COLLECTIVE", "STREAM_FAULT"
"""Environment variables: nccl or hccl, and "number of a sum,signal"."""

if __name__ == "__main__":
    name = os.environ[COLLECTIVE]
    table.KINDS["fake"] = StreamKind(name)
    COLLECTIVES[name] = stream_collective(name)
    if FAULT in os.environ:
        at, signal_number = map(int, os.environ[FAULT].split(","))
        STREAM.fault = at, signal_number
    sys.exit(main(sys.argv[1:]))
