"""Run a command; print a pdserve error as one line, and turn errors, Ctrl-C and a closed pipe into an exit status."""

import atexit
import gc
import os
import sys
from collections.abc import Callable


def guarded(name: str, action: Callable[[], int]) -> int:
    """Run `action`; print a pdserve error as one line on stderr that starts with `name`."""
    atexit.register(gc.freeze)  # the interpreter would walk all that was imported: a second of CPU time with torch
    try:
        return _in_one_line(name, action)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def leave(status: int) -> None:
    """Exit without the interpreter's cleanup, which takes 0.1 s or more in a process that has served."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _in_one_line(name: str, action: Callable[[], int]) -> int:
    from engine.torch_start import name_backends
    from pdserve.variables import check_variables
    from ranktable_tools.errors import RanktableError
    from wire.errors import ConfigError, DeadlineExceeded, Incompatible, PdserveError

    name_backends()  # for this process and its children, before the action may import torch
    try:
        check_variables(os.environ)
        return action()
    except (PdserveError, RanktableError) as error:
        sys.stdout.flush()
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, Incompatible, DeadlineExceeded, RanktableError)) else 1
