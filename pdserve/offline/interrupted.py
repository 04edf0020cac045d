"""Keep Python's behaviour that an uncaught Ctrl-C ends a script by SIGINT: the status is 130, and shell loops end.

CPython records it in a flag, which any later eval of a string clears. torch's exit handler imports
tabulate, if installed, whose namedtuples use eval: the status would be 1. So it is imported earlier.
"""

import contextlib
import importlib
import sys


def import_tabulate() -> None:
    """Import tabulate if torch is loaded; to be called once an engine is loaded."""
    if "torch" in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module("tabulate")
