"""`python -P -m pdserve.bench.pd.keeper CORES COMMAND...`: become COMMAND on those cores, in our process group.

COMMAND and its children die with the bench: a guard reads the pipe of pdserve/parent_death.py, which only the bench
process holds open, and kills the group when that process is gone. This also covers peers that do not read the pipe or
are stopped: the guard is in its own group, and in our session, so that the group's number is not reused.

bench --Popen--> keeper ==exec==> COMMAND --> its children
                   `--fork--> guard: waits for the pipe's end, kills the group
"""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from pdserve import parent_death
from wire.errors import ConfigError


def main(argv: Sequence[str]) -> None:
    """Become the command. Raises ConfigError for wrong CORES or COMMAND."""
    if len(argv) < 2:
        raise ConfigError("usage: keeper CORES COMMAND...")
    os.sched_setaffinity(0, parse_cores(argv[0]))
    pipe_number = os.environ.get(parent_death.VARIABLE)
    if pipe_number is not None and os.fork() == 0:
        _kill_group_at_end(int(pipe_number))
    os.execvp(argv[1], list(argv[1:]))  # noqa: S606 - the bench's command


def parse_cores(text: str) -> set[int]:
    """Parse cores such as `0,2`. Raises ConfigError."""
    try:
        return {int(part) for part in text.split(",")}
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a list of cores: write 0,2") from error


def _kill_group_at_end(pipe: int) -> NoReturn:
    group = os.getpgrp()
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, pipe)  # so that readers of COMMAND's output see its end
    os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
    os.read(pipe, 1)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
