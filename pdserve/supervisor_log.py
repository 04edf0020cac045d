"""What the supervisor says: on its terminal while it has one, and in its log, where `pdserve logs` shows it."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from pdserve.run_folder import open_log


def in_utc(seconds: float) -> str:
    """Return a time in seconds since 1970 as `2026-11-23T03:05:09Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


class SupervisorLog:
    """Says lines. Owns the log, which is begun anew; the last run's is kept beside it."""

    def __init__(self, log: Path) -> None:
        self.log = log
        open_log(log, anew=True).close()

    def say(self, text: str) -> None:
        """Print the text and log it with the time, in UTC.

        A disk that takes nothing costs the log, a terminal that is gone the words on it: neither costs the cluster.
        """
        now = in_utc(time.time())
        with suppress(OSError), self.log.open("a") as file:
            file.write("".join(f"{now} {line}\n" for line in text.splitlines()))
        try:
            print(text, flush=True)
        except OSError:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of our life
