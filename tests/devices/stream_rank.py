"""A rank process on the fake device with a stream (stream.py), whose links, if any are by NCCL, keep its rules.

python -P -m tests.devices.stream_rank CHANNEL_FD PARENT_PID     (PYTHONPATH: the repository)
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from devices import table
from devices.collectives import COLLECTIVES, Collective
from instance.rank_process import main
from tests.devices.stream import STREAM, StreamKind, stream_collective
from tests.kvtransfer.nccl_notes import Notes
from tests.kvtransfer.nccl_rules import NcclRules

PROGRAM = "tests.devices.stream_rank"
COLLECTIVE, FAULT, CAPTURE_FAULT = "STREAM_COLLECTIVE", "STREAM_FAULT", "STREAM_CAPTURE_FAULT"
NOTES = "STREAM_NCCL_NOTES"
"""Environment variables: nccl or hccl, "number of a sum,signal", "number of a capture,sums before,words", and the
folder of NCCL's rules."""


def nccl_collective(rules: NcclRules) -> Collective:
    """The table's nccl, with sums on the fake stream and links by these rules."""
    return replace(rules.collective(), make=stream_collective("nccl").make)


if __name__ == "__main__":
    name = os.environ[COLLECTIVE]
    table.KINDS["fake"] = StreamKind(name)
    COLLECTIVES[name] = stream_collective(name)
    if NOTES in os.environ:
        COLLECTIVES["nccl"] = nccl_collective(NcclRules(Notes(Path(os.environ[NOTES]))))
    if FAULT in os.environ:
        at, signal_number = map(int, os.environ[FAULT].split(","))
        STREAM.fault = at, signal_number
    if CAPTURE_FAULT in os.environ:
        number, sums, words = os.environ[CAPTURE_FAULT].split(",", 2)
        STREAM.capture_fault = int(number), int(sums), words
    sys.exit(main(sys.argv[1:]))
