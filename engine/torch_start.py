"""What must stand before torch is imported: which backends it loads, how its threads wait, how little is collected."""

import gc
import os
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

from devices.npu_package import hide_before_torch

# Turns a libgomp thread spins for the others before it sleeps. Its default of 300,000 burns a core while another
# process holds one of ours; none at all makes an undisturbed step of two threads twice as long (docs/performance.md).
_SPIN_COUNT = "10000"
_AUTOLOAD, _SPINS = "TORCH_DEVICE_BACKEND_AUTOLOAD", "GOMP_SPINCOUNT"
_SET = (_AUTOLOAD, _SPINS)
_YOUNG, _NEVER = 20_000, 1_000_000


@dataclass(slots=True)
class _Kept:
    """What an environment had when the first of those that are in `only_meanwhile` entered; `inside` counts them."""

    before: dict[str, str | None]
    inside: int = 0


_guard = (
    threading.Lock()
)  # an environment is the whole process's: what several threads do to it is counted in one place
_kept: dict[int, _Kept] = {}  # by the environment's id, while somebody is inside


def name_backends(environ: MutableMapping[str, str] = os.environ) -> None:
    """Keep torch from importing each installed device's package, unless the user wants it to. Before torch's import.

    One whose driver is missing would end every process here, also those on the CPU (torch_npu without CANN). Ours is
    imported by name when its device is asked for.
    """
    if environ.setdefault(_AUTOLOAD, "0") == "0":
        hide_before_torch()  # transformers would import it, too


def prepare_torch(num_threads: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Choose how torch's threads wait, where there are several and the user has not chosen. Before torch's import."""
    name_backends(environ)
    if num_threads > 1 and not {_SPINS, "OMP_WAIT_POLICY"} & environ.keys():
        environ[_SPINS] = _SPIN_COUNT


@contextmanager
def only_meanwhile(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Take back at the end what the two above set: a process that is not ours keeps its environment.

    Of several at once, from whatever threads, the last to end takes it back, to what the first one found.
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
    """Collect only young garbage meanwhile: what imports and checkpoints make is nearly all kept.

    In a process of ours it is then set apart, so that no later collection walks it in the middle of a step. Where
    somebody is in `only_meanwhile` it is not: that process may drop the model, and what is set apart stays for good.
    """
    if _kept and "torch" in sys.modules:
        gc.collect()  # the last one's memory, before this one takes its own
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
