"""An uncaught Ctrl-C ends a script by SIGINT, as Python has it: a shell sees 130, and a loop of it ends too.

CPython notes it in a flag, which every later eval of a text clears. torch's handler at the interpreter's end imports
tabulate where that is installed, whose namedtuples are such texts: the status would be 1. So it is imported before.
"""

import contextlib
import importlib
import sys


def import_what_torch_would_at_the_end() -> None:
    """Call it once an engine is loaded; nothing where that runs without torch."""
    if "torch" in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module("tabulate")
