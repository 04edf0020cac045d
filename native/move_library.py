"""The native functions for digests and copies of KV: loaded once, called without the GIL if that is worthwhile."""

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from native.builder import BUILD_TIMEOUT_S, VARIABLE, build_library, find_library
from native.cache import NoNative
from native.memory import Region, RegionRuns, Runs, StopFlag, check_move, check_place
from native.recipe import Recipe

__all__ = ["RECIPE", "VARIABLE", "Library", "build", "load"]

_DIGEST, _STREAM, _KERNEL_SHIFT = 1, 2, 8
_STREAM_BYTES = 16 << 10  # from this size on, writes bypass the caches: targets are read much later, if at all
_QUICK_BYTES = 64 << 10  # below this size the GIL is kept: a busy thread may take 5 ms to give it back
_KNOWN_DIGESTS = {
    0: 0x2D06800538D394C2, 3: 0x5F4299FC161C9CBB, 8: 0x3A1C2D7C85AF88F8, 16: 0x8355E3A6F61770DB,
    100: 0x004E4F921A64BD1C, 200: 0xF42A8864FEAF0703, 1500: 0x011BF4B1F03FB7E7, 2048: 0xDD420471FF96BD00,
}  # fmt: skip
"""XXH3-64 of the first bytes of 0, 1, ... 255, 0, 1, ..."""


class Library:
    """The native functions for digests and copies. Thread-safe; moves of 64 KiB and more run without the GIL."""

    name = "native"

    def __init__(self, path: Path, *, kernel: int | None = None) -> None:
        """Load a built library; `kernel` is one of `kernels`, by default the best. Raises OSError, ValueError."""
        self.path = path
        free, held = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        free.native_kernels.restype = ctypes.c_uint32
        found = int(free.native_kernels())
        self.kernels = tuple(number for number in range(32) if found >> number & 1)
        self.kernel = self.kernels[-1] if kernel is None else kernel
        if self.kernel not in self.kernels:
            raise ValueError(f"kernel {kernel} is not among {self.kernels}")
        self._digest, self._quick_digest = (_declare_digest(library) for library in (free, held))
        self._move, self._quick_move = (_declare_move(library) for library in (free, held))

    def digest(self, place: RegionRuns) -> int:
        """Return XXH3-64 of the runs' bytes, in order. Raises IndexError for runs past the region."""
        check_place(place)
        region, base, runs = place
        num_bytes = runs.num_bytes
        call = self._quick_digest if num_bytes < _QUICK_BYTES else self._digest
        digest: int = call(region.address + base, runs.address, num_bytes, self.kernel << _KERNEL_SHIFT)
        return digest

    def copy(self, source: RegionRuns, target: RegionRuns, stop: StopFlag) -> bool:
        """Copy the source's runs to the target's; return False if `stop` was set meanwhile.

        The flag is checked every 256 KiB; source and target must not overlap. Raises IndexError for runs past their
        region, ValueError for unequal sizes and a read-only target.
        """
        self._run(source, target, stop, 0)
        return not stop.is_set()

    def copy_and_digest(self, source: RegionRuns, target: RegionRuns, stop: StopFlag) -> int | None:
        """Copy like `copy` and return XXH3-64 of the bytes written; None if `stop` was set meanwhile."""
        digest = self._run(source, target, stop, _DIGEST)
        return None if stop.is_set() else digest

    def _run(self, source: RegionRuns, target: RegionRuns, stop: StopFlag, flags: int) -> int:
        check_move(source, target)
        (from_region, from_base, from_runs), (to_region, to_base, to_runs) = source, target
        num_bytes = from_runs.num_bytes
        call = self._quick_move if num_bytes < _QUICK_BYTES else self._move
        if num_bytes >= _STREAM_BYTES:
            flags |= _STREAM
        digest: int = call(
            from_region.address + from_base, from_runs.address, to_region.address + to_base, to_runs.address,
            num_bytes, stop.address, self.kernel << _KERNEL_SHIFT | flags,
        )  # fmt: skip
        return digest


def load(environ: Mapping[str, str] = os.environ) -> Library | None:
    """Return the native functions, or None if they are not built or cannot be. See builder.find_library."""
    return find_library(RECIPE, environ).library


def build(environ: Mapping[str, str] = os.environ, *, timeout_s: float = BUILD_TIMEOUT_S) -> Library:
    """Return the native functions, built if they are not cached. Raises NoNative."""
    return build_library(RECIPE, environ, timeout_s=timeout_s)


def _check_library(path: Path) -> Library:
    """Load a library and check it against known digests. Raises NoNative."""
    try:
        library = Library(path)
    except (OSError, AttributeError, ValueError) as error:
        raise NoNative(f"{path} cannot be loaded: {error}") from error
    region = Region(bytes(range(256)) * 8)
    for num_bytes, known in _KNOWN_DIGESTS.items():
        runs = Runs([(0, num_bytes, 0, 1)] if num_bytes else [])
        if (digest := library.digest(RegionRuns(region, 0, runs))) != known:
            raise NoNative(f"{path}: the digest of {num_bytes} bytes is {digest:#x}, but should be {known:#x}")
    return library


def _declare_digest(library: ctypes.CDLL) -> "ctypes._NamedFuncPointer":
    function = library.native_digest
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32)
    function.restype = ctypes.c_uint64
    return function


def _declare_move(library: ctypes.CDLL) -> "ctypes._NamedFuncPointer":
    function, pointer = library.native_move, ctypes.c_void_p
    function.argtypes = (pointer, pointer, pointer, pointer, ctypes.c_uint64, pointer, ctypes.c_uint32)
    function.restype = ctypes.c_uint64
    return function


RECIPE = Recipe("move", ("move.c",), _check_library)
