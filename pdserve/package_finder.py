"""Import pdserve's own packages, even if the user's folder has an `engine.py` or a `batch/`.

Their names are common words, and a script's own folder is first on sys.path.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = str(Path(__file__).resolve().parents[1])
NAMES = frozenset((
    "batch", "decode_worker", "devices", "engine", "flags", "images", "instance", "kvtransfer", "native",
    "prefill_worker", "processes", "ranktable_tools", "remote_files", "rpc", "scheduler", "security", "simulation",
    "telemetry", "testing", "wire",
))  # fmt: skip


class OwnPackages:
    """A sys.meta_path finder of the packages of NAMES in ROOT alone (importlib.abc takes 8 ms to import)."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a pdserve package, None for everything else."""
        return PathFinder.find_spec(fullname, [ROOT], target) if fullname in NAMES else None


def claim() -> None:
    """Make every later import of a name in NAMES find pdserve's package.

    A foreign module of such a name that is already loaded is removed from sys.modules: code that imported it
    keeps it, and later imports get pdserve's.
    """
    for name in NAMES.intersection(sys.modules):
        if not _is_ours(sys.modules[name]):
            for loaded in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
                del sys.modules[loaded]
    if not any(isinstance(finder, OwnPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, OwnPackages())


def _is_ours(module: ModuleType | None) -> bool:
    """Return whether the module was loaded from ROOT; also true for None, which blocks an import and must stay."""
    if module is None:
        return True
    spec = getattr(module, "__spec__", None)
    places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin or ""]
    return any(place and Path(place).resolve().is_relative_to(ROOT) for place in places)
