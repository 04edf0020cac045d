"""`pdserve down`: stop what `pdserve up` started."""

import os
from collections.abc import Sequence
from pathlib import Path

from pdserve.flags.parser import CommandParser
from pdserve.processes import SCHEDULER_GRACE_S, stop
from pdserve.run_folder import RunFolder, default_run_dir


def main(argv: Sequence[str]) -> int:
    """Run the command; that nothing runs is fine too."""
    parser = CommandParser(prog="pdserve down", description="Stop the cluster that `pdserve up` started.")
    parser.add_argument("--run-dir", default=str(default_run_dir(os.environ)), help="the folder `up` was given")
    parser.add_argument("--timeout", type=float, default=SCHEDULER_GRACE_S, help="seconds running requests get")
    arguments = parser.parse_args(argv)
    folder = RunFolder(Path(arguments.run_dir).absolute())
    state = folder.read()
    living = () if state is None else state.living()
    if not living:
        print("nothing runs here")
    else:
        killed = stop(living, arguments.timeout)
        print(f"stopped {', '.join(process.name for process in living)}")
        for process in killed:
            print(f"{process.name} did not stop in time and was killed (log: {process.log})")
    folder.clear()
    return 0
