"""The engine's native kernels: one library of several C sources, and the thread teams that run them."""

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from native.builder import BUILD_TIMEOUT_S, Found, build_library, find_library
from native.cache import NoNative
from native.compiler import FLAGS
from native.recipe import Recipe

ISAS = ("plain", "avx2", "avx512", "avx512_bf16")
"""enum isa of isa.h, by number."""
MAX_THREADS = 256
"""The same as in threads.h."""


class EngineLibrary:
    """The opened library. Thread-safe; `functions` are called without the GIL."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, and AttributeError for a library that lacks a function."""
        self.path = path
        self.functions = ctypes.CDLL(str(path))
        self.functions.native_isas.restype = ctypes.c_uint32
        self.functions.threads_open.argtypes = (ctypes.c_int, ctypes.c_int)
        self.functions.threads_open.restype = ctypes.c_void_p
        self.functions.threads_close.argtypes = (ctypes.c_void_p,)
        self.functions.threads_close.restype = None
        found = int(self.functions.native_isas())
        self.isas = tuple(name for number, name in enumerate(ISAS) if found >> number & 1)
        self.functions.native_best_isa.restype = ctypes.c_uint32
        self.best_isa = ISAS[int(self.functions.native_best_isa())]

    def check_sizes(self, symbol: str, structs: Sequence[type[ctypes.Structure]]) -> None:
        """Raise NoNative unless `symbol`, an array of uint32 in the library, has the sizes of `structs`."""
        sizes = (ctypes.c_uint32 * len(structs)).in_dll(self.functions, symbol)
        for struct, size in zip(structs, sizes, strict=True):
            if ctypes.sizeof(struct) != size:
                sizes_differ = f"is {size} bytes in the library, but {ctypes.sizeof(struct)} in Python"
                raise NoNative(f"{self.path}: struct {struct.__name__} {sizes_differ}")

    def threads(self, count: int, *, isa: str | None = None) -> "Threads":
        """Start a team of `count` threads that uses the instructions `isa`, one of `isas`, by default the fastest.

        Raises ValueError for an invalid count or unavailable instructions, OSError if threads cannot be created.
        """
        wanted = self.best_isa if isa is None else isa
        if wanted not in self.isas:
            raise ValueError(f"instructions {wanted} are not among {', '.join(self.isas)}")
        if not 1 <= count <= MAX_THREADS:
            raise ValueError(f"the number of threads is {count}, but must be from 1 to {MAX_THREADS}")
        address = self.functions.threads_open(count, ISAS.index(wanted))
        if not address:
            raise OSError(f"the system could not create {count} threads")
        return Threads(self, address, count, wanted)


class Threads:
    """A team of threads, including the caller's, for parallel regions; one region runs at a time, others wait.

    `close` ends the threads; it is not needed when the process exits. A forked child has a team of one.
    """

    def __init__(self, library: EngineLibrary, address: int, count: int, isa: str) -> None:
        """Made by EngineLibrary.threads."""
        self.library, self.count, self.isa = library, count, isa
        self._address: int | None = address

    @property
    def address(self) -> int:
        """The struct threads *. Raises ValueError after close."""
        if self._address is None:
            raise ValueError("the team of threads is closed")
        return self._address

    def close(self) -> None:
        """End the threads, after the running region. Idempotent; no thread may use or wait for the team any more."""
        address, self._address = self._address, None
        if address is not None:
            self.library.functions.threads_close(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def find_engine() -> Found[EngineLibrary]:
    """Return the engine's kernels, or why there are none now. See builder.find_library."""
    return find_library(ENGINE, os.environ)


def build_engine(environ: Mapping[str, str] = os.environ, *, timeout_s: float = BUILD_TIMEOUT_S) -> EngineLibrary:
    """Return the engine's kernels, built if they are not cached. Raises NoNative."""
    return build_library(ENGINE, environ, timeout_s=timeout_s)


def _check_library(path: Path) -> EngineLibrary:
    try:
        library = EngineLibrary(path)
        with library.threads(2):
            return library
    except (OSError, AttributeError, ValueError) as error:
        raise NoNative(f"{path} cannot be loaded: {error}") from error


ENGINE = Recipe(
    "engine",
    (
        "isa.c",
        "threads.c",
        "attention.c",
        "attention_plan.c",
        "attention_kernel.c",
        "attention_write.c",
        "linear.c",
        "layer.c",
        "best.c",
        "draw.c",
    ),
    _check_library,
    flags=(*FLAGS, "-fno-math-errno", "-ffp-contract=off", "-pthread"),
    libraries=("-lm",),
)
"""Add a kernel's source here; the headers it includes are found automatically."""
