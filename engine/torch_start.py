"""Process settings made before torch is imported: backends to load, thread spinning, garbage collection."""

import gc
import os
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

from devices.npu_package import hide_before_torch

# Iterations a libgomp thread spins before it sleeps. Its default of 300,000 wastes a core while another process
# occupies one of ours; 0 makes an undisturbed step of two threads twice as long (docs/performance.md).
_SPIN_COUNT = "10000"
_AUTOLOAD, _SPINS = "TORCH_DEVICE_BACKEND_AUTOLOAD", "GOMP_SPINCOUNT"
_SET = (_AUTOLOAD, _SPINS)
_YOUNG, _NEVER = 20_000, 1_000_000


@dataclass(slots=True)
class _Kept:
    """An environment's values before the first active `only_meanwhile`; `inside` counts the active ones."""

    before: dict[str, str | None]
    inside: int = 0


_guard = threading.Lock()  # the environment belongs to the process: changes by several threads are counted in one place
_kept: dict[int, _Kept] = {}  # by the environment's id, while an `only_meanwhile` is active


def name_backends(environ: MutableMapping[str, str] = os.environ) -> None:
    """Stop torch from importing every installed backend, unless the user wants that. Call before importing torch.

    A backend whose driver is missing (torch_npu without CANN) would crash every process, even on the CPU. The backend
    in use is imported by name when its device is opened.
    """
    if environ.setdefault(_AUTOLOAD, "0") == "0":
        hide_before_torch()  # transformers would import it too


def prepare_torch(num_threads: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set how torch's threads wait, if there are several and the user has not set it. Call before importing torch."""
    name_backends(environ)
    if num_threads > 1 and not {_SPINS, "OMP_WAIT_POLICY"} & environ.keys():
        environ[_SPINS] = _SPIN_COUNT


@contextmanager
def only_meanwhile(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Undo on exit the settings of the two functions above: a process that only embeds us keeps its environment.

    If several are active, in any threads, the last to exit restores the values from before the first.
    """
    with _guard:
        kept = _kept.setdefault(id(environ), _Kept({name: environ.get(name) for name in _SET}))
        kept.inside += 1
    try:
        yield
    finally:
        with _guard:
            kept.inside -= 1
            if not kept.inside:
                del _kept[id(environ)]
                _restore(environ, kept.before)


@contextmanager
def loading() -> Iterator[None]:
    """Collect only young garbage in this block: objects from imports and checkpoints nearly all stay alive.

    In our own processes they are then frozen (`gc.freeze`), so that no later collection walks them during a step. They
    are not frozen while an `only_meanwhile` is active: that process may drop the model, and frozen objects are never
    collected.
    """
    if _kept and "torch" in sys.modules:
        gc.collect()  # frees a previous model before this one is loaded
    thresholds = gc.get_threshold()
    gc.set_threshold(_YOUNG, _NEVER, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not _kept:
            gc.freeze()


def _restore(environ: MutableMapping[str, str], before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
