"""An uncaught Ctrl-C ends a script by SIGINT, as Python has it: a shell sees 130, and a loop of it ends too.

CPython notes it in a flag, which every later exec or eval of a text clears: handlers at the interpreter's end that
import something with a namedtuple do (torch's), so that the status would be 1.
"""

import atexit
import contextlib
import functools
import sys

_MARK = "raise KeyboardInterrupt"


@functools.cache
def end_as_interrupted() -> None:
    """Set the flag again at the end where a Ctrl-C was not caught. Call it before torch is imported.

    Handlers run in the order of their making, the last one first.
    """
    atexit.register(_mark_again)


def _mark_again() -> None:
    is_prompt = hasattr(sys, "ps1") or sys.flags.interactive  # where a Ctrl-C ends one line alone
    if getattr(sys, "last_type", None) is not KeyboardInterrupt or is_prompt:
        return
    with contextlib.suppress(KeyboardInterrupt):
        exec(_MARK)  # noqa: S102 - a text of ours: only a text's own KeyboardInterrupt sets the flag
