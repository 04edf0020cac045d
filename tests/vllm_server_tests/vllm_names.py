"""What vLLM's tests import from vLLM: ours where a test of the server uses it, else a name that fails when used.

`install` adds a finder for `vllm`, `tests.utils` and the other modules of vLLM's own test suite.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_ROOTS = ("vllm", "tests.utils", "tests.conftest", "tests.models", "tests.v1", "tests.entrypoints.pooling.scoring.util")


class _NeverUsed(type):
    """A name that tests of the server import and do not use: any use fails the test."""

    def __call__(cls, *values: object, **settings: object) -> Any:
        raise NotImplementedError(f"{cls.__qualname__} has no stand-in here")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NeverUsed(name, (), {"__qualname__": f"{cls.__qualname__}.{name}"})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below the roots; its names are those of `names`."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == root or fullname.startswith(f"{root}.") for root in _ROOTS):
            return importlib.util.spec_from_loader(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        def find(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            full = f"{module.__name__}.{name}"
            if full in self._names:
                return self._names[full]
            if any(known.startswith(f"{full}.") for known in self._names):
                return importlib.import_module(full)
            return _NeverUsed(name, (), {"__qualname__": full, "__module__": module.__name__})

        module.__getattr__ = find  # type: ignore[method-assign]


def install(names: dict[str, Any]) -> None:
    """Find vLLM's modules from now on, with these names in them by `module.name`."""
    sys.meta_path.insert(0, _Finder(names))
