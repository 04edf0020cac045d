"""End with the process that started us: by the kernel's parent-death signal, and by a pipe that only it holds open.

The signal is at once and needs nothing of ours to run; the pipe covers a parent that died before we could ask for it.
Both kill: whoever could have drained us is gone, and what is left would hold devices, ports and blocks.
"""

import ctypes
import os
import signal
import stat
import threading
from collections.abc import MutableMapping

from wire.errors import ConfigError

VARIABLE = "PDSERVE_PARENT_PIPE"
_PR_SET_PDEATHSIG = 1  # Linux, include/uapi/linux/prctl.h


def hold_on(environ: MutableMapping[str, str]) -> None:
    """Be killed when the parent ends, where it said so by a pipe's number in VARIABLE, which is taken out.

    Raises ConfigError where the variable names no pipe.
    """
    told = environ.pop(VARIABLE, None)
    if told is None:
        return
    descriptor = _pipe(told)
    os.set_inheritable(descriptor, False)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_end_with, args=(descriptor,), name="tether", daemon=True).start()


def _pipe(told: str) -> int:
    try:
        descriptor = int(told)
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return descriptor
    except (ValueError, OSError):
        pass
    raise ConfigError(f"{VARIABLE} is {told!r}, which is no pipe of ours: unset it")


def _end_with(descriptor: int) -> None:
    os.read(descriptor, 1)  # nobody writes: it returns when the last writer is gone
    os.kill(os.getpid(), signal.SIGKILL)
