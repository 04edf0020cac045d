"""Build the native functions once, load them, and call them.

    native/*.c, *.h --compiler--> <cache>/native/<source key>-<compiler's stamp>.so --dlopen, self-check--> Library

The source key covers the sources, the compiler's flags and the platform; instructions beyond the platform's least are
chosen when a function runs. Without a compiler a library that one built earlier from the same sources is taken.
PDSERVE_NATIVE=off, no compiler, a failed build: there is no Library, and callers do the work in Python.
"""

import ctypes
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from native.cache import NoNative, building, is_ours, library_folder, replace_whole
from native.compiler import FLAGS, Compiler, find_compiler
from native.memory import Place, Region, Runs, StopFlag, check_move, check_place

VARIABLE = "PDSERVE_NATIVE"
BUILD_TIMEOUT_S = 60.0
_SOURCES = Path(__file__).parent
_MAIN = "move.c"
_DIGEST, _STREAM, _KERNEL_SHIFT = 1, 2, 8
_STREAM_BYTES = 16 << 10  # from here on targets are written past the caches: they are read much later, if at all
_QUICK_BYTES = 64 << 10  # below, the GIL is kept: giving it away may cost 5 ms until a busy thread gives it back
_KNOWN_DIGESTS = {
    0: 0x2D06800538D394C2, 3: 0x5F4299FC161C9CBB, 8: 0x3A1C2D7C85AF88F8, 16: 0x8355E3A6F61770DB,
    100: 0x004E4F921A64BD1C, 200: 0xF42A8864FEAF0703, 1500: 0x011BF4B1F03FB7E7, 2048: 0xDD420471FF96BD00,
}  # fmt: skip
"""XXH3-64 of the first bytes of 0, 1, ... 255, 0, 1, ..."""

_log = logging.getLogger("pdserve.native")


class Library:
    """The native functions for digests and copies. Thread-safe; moves of 64 KiB and more run without the GIL."""

    name = "native"

    def __init__(self, path: Path, *, kernel: int | None = None) -> None:
        """Load a built library; `kernel` is one of `kernels` instead of the best. Raises OSError, ValueError."""
        self.path = path
        free, held = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        free.native_kernels.restype = ctypes.c_uint32
        found = int(free.native_kernels())
        self.kernels = tuple(number for number in range(32) if found >> number & 1)
        self.kernel = self.kernels[-1] if kernel is None else kernel
        if self.kernel not in self.kernels:
            raise ValueError(f"kernel {kernel} is none of {self.kernels}")
        self._digest, self._quick_digest = (_declare_digest(library) for library in (free, held))
        self._move, self._quick_move = (_declare_move(library) for library in (free, held))

    def digest(self, place: Place) -> int:
        """Return XXH3-64 of the runs one after another. Raises IndexError for runs past the region."""
        check_place(place)
        region, base, runs = place
        num_bytes = runs.num_bytes
        call = self._quick_digest if num_bytes < _QUICK_BYTES else self._digest
        digest: int = call(region.address + base, runs.address, num_bytes, self.kernel << _KERNEL_SHIFT)
        return digest

    def copy(self, source: Place, target: Place, stop: StopFlag) -> bool:
        """Fill the target's runs from the source's; False when `stop` was set meanwhile.

        The flag is looked at every 256 KiB; source and target must not overlap. Raises IndexError for runs past their
        region, ValueError for unequal sizes and a target that is only readable.
        """
        self._run(source, target, stop, 0)
        return not stop.is_set()

    def copy_and_digest(self, source: Place, target: Place, stop: StopFlag) -> int | None:
        """Copy like `copy` and return XXH3-64 of what was written; None when `stop` was set meanwhile."""
        digest = self._run(source, target, stop, _DIGEST)
        return None if stop.is_set() else digest

    def _run(self, source: Place, target: Place, stop: StopFlag, flags: int) -> int:
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


def load(environ: Mapping[str, str] = os.environ, *, timeout_s: float = BUILD_TIMEOUT_S) -> Library | None:
    """Return the native functions, built if need be; None, with one warning, where that fails.

    None without a word under PDSERVE_NATIVE=off. Raises ValueError for other values than on and off.
    """
    wanted = environ.get(VARIABLE) or "on"
    if wanted not in ("on", "off"):
        raise ValueError(f"{VARIABLE}={wanted}: choose on or off")
    if wanted == "off":
        return None
    try:
        return build(environ, timeout_s=timeout_s)
    except NoNative as error:
        reason = json.dumps(" ".join(str(error).split()), ensure_ascii=True)
        _log.warning("native_unavailable reason=%s", reason)
        return None


def build(environ: Mapping[str, str] = os.environ, *, timeout_s: float = BUILD_TIMEOUT_S) -> Library:
    """Return the native functions, from the cache if they are there. Raises NoNative."""
    folder, compiler = library_folder(environ), find_compiler(environ)
    path = _path(folder, compiler)
    try:
        if path is not None and is_ours(folder) and is_ours(path):
            return _checked(path)
    except NoNative:
        if compiler is None or not is_ours(folder):
            raise  # else the file alone is bad: it is built anew
    if compiler is None or path is None:
        raise NoNative("there is no C compiler (CC, cc, gcc, clang)")
    try:
        return _build(path, compiler, environ, time.monotonic() + timeout_s)
    except OSError as error:
        raise NoNative(f"{folder} cannot be written: {error}") from error


def _build(path: Path, compiler: Compiler, environ: Mapping[str, str], deadline: float) -> Library:
    with building(path.parent, deadline):
        try:
            if is_ours(path):  # another process was faster
                return _checked(path)
        except NoNative:
            path.unlink()
        for left_over in path.parent.glob("draft-*"):  # of builds that were killed: the lock is ours
            left_over.unlink()
        draft = path.parent / f"draft-{os.getpid()}.so"
        try:
            compiler.build(_SOURCES / _MAIN, draft, environ=environ, deadline=deadline)
            draft.chmod(0o700)
            _checked(draft)
            replace_whole(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        return Library(path)


def _path(folder: Path, compiler: Compiler | None) -> Path | None:
    key = _source_key()
    if compiler is not None:
        return folder / f"{key}-{compiler.stamp}.so"
    return next(iter(sorted(folder.glob(f"{key}-*.so"))), None)


def _source_key() -> str:
    facts = [" ".join(FLAGS), os.uname().machine, getattr(sys.implementation, "_multiarch", sys.platform)]
    key = hashlib.sha256(repr(facts).encode())
    for source in sorted([*_SOURCES.glob("*.c"), *_SOURCES.glob("*.h")]):
        content = source.read_bytes()
        key.update(f"{source.name} {len(content)}\n".encode() + content)
    return key.hexdigest()[:16]


def _checked(path: Path) -> Library:
    """Load a library and ask it what is known. Raises NoNative."""
    try:
        library = Library(path)
    except (OSError, AttributeError, ValueError) as error:
        raise NoNative(f"{path} cannot be loaded: {error}") from error
    region = Region(bytes(range(256)) * 8)
    for num_bytes, known in _KNOWN_DIGESTS.items():
        runs = Runs([(0, num_bytes, 0, 1)] if num_bytes else [])
        if (digest := library.digest(Place(region, 0, runs))) != known:
            raise NoNative(f"{path}: the digest of {num_bytes} bytes is {digest:#x}, it should be {known:#x}")
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
