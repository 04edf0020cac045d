"""End with the process that started us: by the kernel's parent-death signal, and by a pipe that only it holds open.

The signal is at once and needs nothing of ours to run; the pipe covers a parent that died before we could ask for it.
Both kill: whoever could have drained us is gone, and what is left would hold devices, ports and blocks.
"""

import ctypes
import os
import signal
import stat
import threading
from collections.abc import Callable, MutableMapping

from pdserve.descendants import end_descendants
from pdserve.variables import OF_PARENT
from wire.errors import ConfigError

VARIABLE = OF_PARENT
_CHILDREN_S = 10.0
_PR_SET_PDEATHSIG = 1  # Linux, include/uapi/linux/prctl.h
_ending = threading.Lock()
"""Taken by who ends the process first, and kept: a second one would not know the orphans that the first one makes."""


def _nothing() -> None:
    pass


def hold_on(environ: MutableMapping[str, str], at_end: Callable[[], None] = _nothing) -> None:
    """Be killed when the parent ends, where it said so by a pipe's number in VARIABLE, which is taken out.

    `at_end` is called before, once, to remove what the parent would have: after all that this process started has
    ended, or _CHILDREN_S have passed. Call it from the main thread. Raises ConfigError where the variable names no
    pipe.
    """
    told = environ.pop(VARIABLE, None)
    if told is None:
        return
    descriptor = _pipe(told)
    os.set_inheritable(descriptor, False)
    number = signal.SIGKILL
    if at_end is not _nothing:
        number = signal.SIGUSR1
        signal.signal(number, lambda number, frame: _end_by_signal(number, at_end))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    threading.Thread(target=_end_with, args=(descriptor, at_end), name="tether", daemon=True).start()


def _pipe(told: str) -> int:
    try:
        descriptor = int(told)
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return descriptor
    except (ValueError, OSError):
        pass
    raise ConfigError(f"{VARIABLE} is {told!r}, which is no pipe of ours: unset it")


def _end_with(descriptor: int, at_end: Callable[[], None]) -> None:
    os.read(descriptor, 1)  # nobody writes: it returns when the last writer is gone
    _end(at_end)


def _end_by_signal(number: int, at_end: Callable[[], None]) -> None:
    signal.signal(number, signal.SIG_IGN)  # once: a handler within itself would wait for itself
    _end(at_end)


def _end(at_end: Callable[[], None]) -> None:
    _ending.acquire()
    try:
        if at_end is not _nothing:
            _hold_the_main_thread()
            end_descendants(_CHILDREN_S)  # else they would run on what is removed
            at_end()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def _hold_the_main_thread() -> None:
    """Let it wait in its handler where this is another one: it would go on starting and writing what we remove."""
    main = threading.main_thread()
    if main is not threading.current_thread() and main.ident is not None:
        signal.pthread_kill(main.ident, signal.SIGUSR1)
