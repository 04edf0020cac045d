"""Hide an installed torch_npu from imports when CANN, which it needs, is missing.

transformers imports torch_npu whenever it is installed, whatever the device; without CANN that crashes the process.
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
_NEEDS = "libascendcl.so"  # CANN's runtime, which torch_npu links to
_IMPORTERS = frozenset({"torch", "transformers"})


def hide_before_torch() -> None:
    """When torch or transformers is imported, hide torch_npu if CANN is missing; most commands import neither."""
    if _IMPORTERS & sys.modules.keys():
        hide_without_cann()
    elif not any(isinstance(finder, _BeforeTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorch())


class _BeforeTorch:
    """A module finder that finds nothing: it runs the check when torch or transformers is imported, once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None always."""
        if name in _IMPORTERS:
            with contextlib.suppress(ValueError):  # another thread imports it too and has removed this finder
                sys.meta_path.remove(self)
            hide_without_cann()
        return None


def hide_without_cann() -> None:
    """Make torch_npu look uninstalled to imports and find_spec if CANN's runtime cannot be loaded."""
    if NAME in sys.modules or importlib.util.find_spec(NAME) is None:
        return
    try:
        ctypes.CDLL(_NEEDS)
    except OSError:
        hide()


def hide() -> None:
    """Hide torch_npu, unless it was already imported: then it works for the module that imported it."""
    modules: dict[str, Any] = sys.modules  # None makes Python's import raise ModuleNotFoundError
    modules.setdefault(NAME, None)


def show() -> bool:
    """Undo `hide`; return whether torch_npu is installed."""
    if sys.modules.get(NAME, ...) is None:
        del sys.modules[NAME]
    return importlib.util.find_spec(NAME) is not None
