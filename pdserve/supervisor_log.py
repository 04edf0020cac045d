"""The supervisor's output: to its terminal while it has one, and to its log, which `pdserve logs` shows."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from pdserve.run_folder import open_log


def in_utc(seconds: float) -> str:
    """Format a time in seconds since 1970 as `2026-11-23T03:05:09Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


class SupervisorLog:
    """Prints and logs lines. Owns the log, which starts empty; the last run's is kept beside it."""

    def __init__(self, log: Path) -> None:
        self.log = log
        open_log(log, anew=True).close()

    def say(self, text: str) -> None:
        """Print the text and log it with the UTC time.

        A full disk loses lines of the log, and a closed terminal loses output, but neither ends the cluster.
        """
        now = in_utc(time.time())
        with suppress(OSError), self.log.open("a") as file:
            file.write("".join(f"{now} {line}\n" for line in text.splitlines()))
        try:
            print(text, flush=True)
        except OSError:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until exit
