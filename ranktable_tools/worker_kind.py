"""PDSERVE_WORKER: the engine whose workers are started as instances and listed in tables."""

from collections.abc import Mapping
from typing import Final

from ranktable_tools.errors import RanktableError
from ranktable_tools.tables import WORKER_KINDS, WorkerKind

VARIABLE: Final = "PDSERVE_WORKER"


def worker_named(text: str | None) -> WorkerKind | None:
    """Return the engine of this name, None for any other text."""
    return next((kind for kind in WORKER_KINDS if kind == text), None)


def requested_worker(environ: Mapping[str, str]) -> WorkerKind | None:
    """Return the variable's value; None where it is unset or empty. Raises RanktableError for another value."""
    value = environ.get(VARIABLE, "")
    kind = worker_named(value)
    if kind is not None or not value:
        return kind
    kinds = " or ".join(WORKER_KINDS)
    raise RanktableError(f'{VARIABLE} is "{value}": must be {kinds}, or unset for instances of pdserve itself')
