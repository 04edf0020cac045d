"""`python -P -m pdserve.bench.pd.keeper CORES COMMAND...`: become COMMAND on those cores, its process group ours.

What it starts ends with whoever started us: a guard reads the tether's pipe (pdserve/tether.py), which only that
process holds open, and kills the group when it is gone. So a peer that knows no tether leaves nothing either, nor one
that is stopped: the guard is in a group of its own, and in our session, so that nobody else gets the group's number.

bench --Popen--> keeper ==exec==> COMMAND --> its children
                   `--fork--> guard: waits for the pipe's end, kills the group
"""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from pdserve import tether
from wire.errors import ConfigError


def main(argv: Sequence[str]) -> None:
    """Become the command. Raises ConfigError where CORES or COMMAND are wrong."""
    if len(argv) < 2:
        raise ConfigError("usage: keeper CORES COMMAND...")
    os.sched_setaffinity(0, parse_cores(argv[0]))
    told = os.environ.get(tether.VARIABLE)
    if told is not None and os.fork() == 0:
        _guard(int(told))
    os.execvp(argv[1], list(argv[1:]))  # noqa: S606 - what the bench starts


def parse_cores(text: str) -> set[int]:
    """Return the cores of `0,2`. Raises ConfigError."""
    try:
        return {int(part) for part in text.split(",")}
    except ValueError as error:
        raise ConfigError(f"{text!r} are no cores: write 0,2") from error


def _guard(pipe: int) -> NoReturn:
    group = os.getpgrp()
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, pipe)  # whoever reads what COMMAND writes hears of its end
    os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
    os.read(pipe, 1)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
