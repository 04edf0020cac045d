"""Find pdserve's packages beside pdserve, also from a folder with an `engine.py` or a `batch/` of its user.

Their names are plain words, and a script's own folder stands first on sys.path.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = str(Path(__file__).resolve().parents[1])
NAMES = frozenset((
    "batch", "decode_worker", "devices", "engine", "instance", "kvtransfer", "native", "prefill_worker",
    "ranktable_tools", "scheduler", "telemetry", "wire",
))  # fmt: skip


class OwnPackages:
    """Finds the packages of NAMES in ROOT alone, as sys.meta_path wants it (importlib.abc takes 8 ms to import)."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a package of ours is, None for everything else."""
        return PathFinder.find_spec(fullname, [ROOT], target) if fullname in NAMES else None


def claim() -> None:
    """Let every import of a name of NAMES find ours from now on.

    A module of somebody else's that has such a name and is loaded already is forgotten, not ended: whoever imported it
    keeps it, and who imports that name later gets ours.
    """
    for name in NAMES.intersection(sys.modules):
        if not _is_ours(sys.modules[name]):
            for loaded in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
                del sys.modules[loaded]
    if not any(isinstance(finder, OwnPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, OwnPackages())


def _is_ours(module: ModuleType | None) -> bool:
    """Whether it was loaded from ROOT; None, which forbids an import, is nobody's to change."""
    if module is None:
        return True
    spec = getattr(module, "__spec__", None)
    places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin or ""]
    return any(place and Path(place).resolve().is_relative_to(ROOT) for place in places)
