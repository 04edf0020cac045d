"""The native sum over ranks that share memory (ranks.c): loaded once, called without the GIL."""

import ctypes
import os
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

from native.builder import find_library
from native.cache import NoNative
from native.recipe import Recipe

LINE_BYTES = 64
_PAGE_BYTES = 4096


class SumOutcome(IntEnum):
    """How a sum ended."""

    DONE, LATE, ABORTED = range(3)


def shared_bytes(num_ranks: int, slot_bytes: int) -> int:
    """Return the size of the memory that the ranks share, which must be zeroed."""
    return lines_bytes(num_ranks) + 2 * num_ranks * slot_bytes


def lines_bytes(num_ranks: int) -> int:
    """Return the size of the start of that memory: a counter per rank, and the abort flag."""
    return -(-(num_ranks + 1) * LINE_BYTES // _PAGE_BYTES) * _PAGE_BYTES


class RanksLibrary:
    """The opened library. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Load a built library. Raises OSError, AttributeError."""
        self._sum = ctypes.CDLL(str(path)).native_sum
        number, size, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
        self._sum.argtypes = (pointer, number, number, size, pointer, size, ctypes.c_double)
        self._sum.restype = ctypes.c_int32

    def sum(
        self, shared: int, rank: int, num_ranks: int, slot_bytes: int, data: int, count: int, timeout_s: float
    ) -> SumOutcome:
        """Sum `count` float32 at address `data` over all ranks, in place; `shared` is the shared memory's address.

        `slot_bytes` is a multiple of 64 and equal in all ranks. `data` is valid only after DONE.
        """
        return SumOutcome(self._sum(shared, rank, num_ranks, slot_bytes, data, count, timeout_s))


def load(environ: Mapping[str, str] = os.environ) -> RanksLibrary | None:
    """Return the library, or None if it is not built or cannot be. See builder.find_library."""
    return find_library(RECIPE, environ).library


def _checked(path: Path) -> RanksLibrary:
    """Load a library and check a sum over one rank. Raises NoNative."""
    try:
        library = RanksLibrary(path)
    except (OSError, AttributeError) as error:
        raise NoNative(f"{path} cannot be loaded: {error}") from error
    shared = (ctypes.c_char * shared_bytes(1, LINE_BYTES))()
    data = (ctypes.c_float * 40)(*range(40))
    outcome = library.sum(ctypes.addressof(shared), 0, 1, LINE_BYTES, ctypes.addressof(data), 40, 1.0)
    if outcome != SumOutcome.DONE or list(data) != [float(value) for value in range(40)]:
        raise NoNative(f"{path}: a sum over one rank is {outcome.name}, {list(data)[:4]}")
    return library


RECIPE = Recipe("ranks", ("ranks.c",), _checked)
