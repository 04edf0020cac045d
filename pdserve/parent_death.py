"""Die with the parent process: by the kernel's parent-death signal, and by a pipe that only the parent holds open.

The signal is immediate and needs no thread of ours; the pipe covers a parent that died before we requested the signal.
Both kill at once: nothing is left to drain us, and a survivor would hold devices, ports and blocks.
"""

import os
import signal
import stat
import threading
from collections.abc import Callable, MutableMapping

from pdserve.descendants import end_descendants
from pdserve.variables import PARENT_PIPE
from processes.child_limits import signal_at_parent_end
from wire.errors import ConfigError

VARIABLE = PARENT_PIPE
_CHILDREN_S = 10.0
_ending = threading.Lock()
"""Acquired by the first thread that ends the process, never released: a second one could not find the
processes that the first orphaned."""


def _do_nothing() -> None:
    pass


def die_with_parent(environ: MutableMapping[str, str], at_end: Callable[[], None] = _do_nothing) -> None:
    """Die when the parent does, if it put a pipe's descriptor into VARIABLE, which is removed.

    `at_end` is called once before that, to clean up for the parent, after all processes that this one started have
    ended or _CHILDREN_S have passed. Call this function from the main thread. Raises ConfigError if VARIABLE does not
    name a pipe.
    """
    number_text = environ.pop(VARIABLE, None)
    if number_text is None:
        return
    descriptor = _pipe_descriptor(number_text)
    os.set_inheritable(descriptor, False)
    number = signal.SIGKILL
    if at_end is not _do_nothing:
        number = signal.SIGUSR1
        signal.signal(number, lambda number, frame: _end_by_signal(number, at_end))
    signal_at_parent_end(number)
    threading.Thread(target=_end_with, args=(descriptor, at_end), name="parent-death", daemon=True).start()


def _pipe_descriptor(number_text: str) -> int:
    try:
        descriptor = int(number_text)
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return descriptor
    except (ValueError, OSError):
        pass
    raise ConfigError(f"{VARIABLE} is {number_text!r}, which is not a pipe: unset it")


def _end_with(descriptor: int, at_end: Callable[[], None]) -> None:
    os.read(descriptor, 1)  # nothing is written: it returns when the last writer is gone
    _end(at_end)


def _end_by_signal(number: int, at_end: Callable[[], None]) -> None:
    signal.signal(number, signal.SIG_IGN)  # only once: a nested handler would wait for itself
    _end(at_end)


def _end(at_end: Callable[[], None]) -> None:
    _ending.acquire()
    try:
        if at_end is not _do_nothing:
            _block_main_thread()
            end_descendants(_CHILDREN_S)  # else they would use what at_end removes
            at_end()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def _block_main_thread() -> None:
    """Block the main thread, unless we run on it, in a handler: it could keep writing what at_end removes."""
    main = threading.main_thread()
    if main is not threading.current_thread() and main.ident is not None:
        signal.pthread_kill(main.ident, signal.SIGUSR1)
