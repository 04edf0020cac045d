"""torch_npu where it is installed without the CANN that it needs: out of sight, so that nobody imports it unasked.

transformers imports it wherever it finds it, on whatever device one computes; without CANN that ends the process.
Imports neither torch nor torch_npu.
"""

import contextlib
import ctypes
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "torch_npu"
_NEEDS = "libascendcl.so"  # CANN's runtime; torch_npu links to it
_IMPORTERS = frozenset({"torch", "transformers"})


def hide_before_torch() -> None:
    """Hide it without CANN as soon as something is imported that would import it: most commands import no torch."""
    if _IMPORTERS & sys.modules.keys():
        hide_without_cann()
    elif not any(isinstance(finder, _BeforeTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorch())


class _BeforeTorch:
    """A finder of modules that finds none: it sees what is about to be imported, and goes once that is torch."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Never find anything."""
        if name in _IMPORTERS:
            with contextlib.suppress(ValueError):  # another thread imports it, too
                sys.meta_path.remove(self)
            hide_without_cann()
        return None


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
