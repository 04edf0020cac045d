"""torch_npu where it is installed without the CANN that it needs: out of sight, so that nobody imports it unasked.

transformers imports it wherever it finds it, on whatever device one computes; without CANN that ends the process.
Imports neither torch nor torch_npu.
"""

import ctypes
import importlib.util
import sys
from typing import Any

NAME = "torch_npu"
_NEEDS = "libascendcl.so"  # CANN's runtime; torch_npu links to it


def hide_without_cann() -> None:
    """Make it look as if it were not installed, to imports and to find_spec, where CANN's runtime cannot be loaded."""
    if NAME in sys.modules or importlib.util.find_spec(NAME) is None:
        return
    try:
        ctypes.CDLL(_NEEDS)
    except OSError:
        hide()


def hide() -> None:
    """Hide it, unless it was imported: then it works as far as others need it."""
    modules: dict[str, Any] = sys.modules  # None is how Python's import is told that there is none
    modules.setdefault(NAME, None)


def show() -> bool:
    """Undo that; return whether it is installed."""
    if sys.modules.get(NAME, ...) is None:
        del sys.modules[NAME]
    return importlib.util.find_spec(NAME) is not None
