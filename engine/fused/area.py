"""Memory for packed weights: private to this process, or a memfd shared by the instances of one host.

    empty --locked, filled, every layer checked--> sealed, with its key --mapped read-only--> instances that start later

If the filling process dies, the memfd stays unsealed and the next process starts over. Private memory is used if the
key differs, on hosts with several NUMA nodes (to avoid remote reads), and on Linux before 6.1, which cannot put a memfd
into huge pages: without huge pages reading is a quarter slower.
"""

import ctypes
import fcntl
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HUGE = 2 << 20
VARIABLE = "PDSERVE_WEIGHTS_FD"
NAME = "pdserve-weights"
_HEADER_BYTES = 4096
_MADV_COLLAPSE = 25  # Linux 6.1, include/uapi/asm-generic/mman-common.h
_F_SEAL_FUTURE_WRITE = 0x10
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
_WAIT_S, _POLL_S = 120.0, 0.05
_LOW_PRIORITY = 10  # a tenth of a busy engine's CPU share: a small delay for the engine, for minutes at most
_COLLAPSED_AT_ONCE = 16 * HUGE
_NODES = Path("/sys/devices/system/node")
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 1, 2, 0x10, 0x20


def _do_nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Area:
    """Memory from the address `start` on. `is_filled`: the weights are in it, and it is read-only.

    `publish` shares the filled memory, `release` unlocks it for others; both do nothing for private memory. `owner`
    keeps the memory alive.
    """

    start: int
    is_filled: bool
    owner: object
    publish: Callable[[], None] = _do_nothing
    release: Callable[[], None] = _do_nothing


def own_area(num_bytes: int) -> Area:
    """Return private memory, in huge pages if the system has them; pages are allocated when they are written."""
    owner = mmap.mmap(-1, num_bytes + 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        owner.madvise(mmap.MADV_HUGEPAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(owner))
    return Area(-(-start // HUGE) * HUGE, False, owner)


class SharedWeights:
    """A memfd for the packed weights of the model identified by `key`. Owns the lock while it is being filled."""

    def __init__(self, descriptor: int, key: bytes) -> None:
        self._descriptor, self._key = descriptor, key

    def area(self, num_bytes: int) -> Area | None:
        """Return the area, filled or locked for the caller to fill; None if the caller must use private memory.

        Waits up to _WAIT_S for another process that is filling it.
        """
        if len(list(_NODES.glob("node[0-9]*"))) > 1 or not _can_collapse():
            return None
        size = -(-num_bytes // HUGE) * HUGE
        try:
            if not self._lock():
                return None
            return self._find_or_make(size)
        except OSError:
            self._unlock()
            return None

    def _find_or_make(self, size: int) -> Area | None:
        header = self._key + size.to_bytes(8, "little")
        is_sealed = bool(fcntl.fcntl(self._descriptor, fcntl.F_GET_SEALS) & _F_SEAL_FUTURE_WRITE)
        if is_sealed:
            self._unlock()
            end = os.fstat(self._descriptor).st_size - _HEADER_BYTES
            if os.pread(self._descriptor, len(header), end) != header:
                return None
            return Area(_map(self._descriptor, size, mmap.PROT_READ), True, self)
        os.ftruncate(self._descriptor, 0)
        os.ftruncate(self._descriptor, size + _HEADER_BYTES)
        start = _map(self._descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
        return Area(start, False, self, lambda: self._seal(start, size, header), self._unlock)

    def _seal(self, start: int, size: int, header: bytes) -> None:
        os.pwrite(self._descriptor, header, size)
        if _libc().mprotect(start, size, mmap.PROT_READ):
            raise OSError(ctypes.get_errno(), "packed weights cannot be made read-only")
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
        threading.Thread(target=_use_huge_pages, args=(start, size), name="huge-pages", daemon=True).start()

    def _lock(self) -> bool:
        deadline = time.monotonic() + _WAIT_S
        while True:
            with suppress(BlockingIOError, PermissionError):
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)

    def _unlock(self) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


def shared_weights(path: Path, *facts: str, text: str) -> SharedWeights | None:
    """Return the memfd with descriptor number `text`, for the checkpoint in folder `path`; None if it is no such memfd.

    The key is made of the files' names, sizes, times and inodes, and of `facts`: what else the packed bytes depend on.
    """
    if not text.isdecimal():
        return None
    try:
        if not os.readlink(f"/proc/self/fd/{text}").startswith(f"/memfd:{NAME}"):
            return None
        os.set_inheritable(int(text), False)
        found = sorted((one.name, one.stat()) for one in path.iterdir() if one.is_file())
    except OSError:
        return None
    files = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found]
    return SharedWeights(int(text), hashlib.sha256(repr((files, facts)).encode()).digest())


def _use_huge_pages(start: int, size: int) -> None:
    """Put the memory into huge pages, at low priority."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
    for place in range(0, size, _COLLAPSED_AT_ONCE):
        _libc().madvise(start + place, min(_COLLAPSED_AT_ONCE, size - place), _MADV_COLLAPSE)


def _can_collapse() -> bool:
    """Return whether Linux can put a memfd into huge pages here, by trying it on one page."""
    descriptor = os.memfd_create("pdserve-trial")
    try:
        os.ftruncate(descriptor, HUGE)
        start = _map(descriptor, HUGE, mmap.PROT_READ | mmap.PROT_WRITE)
        ctypes.memset(start, 1, 1)
        can = bool(_libc().madvise(start, HUGE, _MADV_COLLAPSE) == 0)
        _libc().munmap(start, HUGE)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return can


def _map(descriptor: int, size: int, protection: int) -> int:
    """Map a file from its start, aligned to a huge page, for the life of the process. Raises OSError."""
    libc = _libc()
    reserved: int | None = libc.mmap(None, size + HUGE, 0, _MAP_PRIVATE | _MAP_ANONYMOUS, -1, 0)
    if reserved is None or reserved == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "no address space for packed weights")
    start = -(-reserved // HUGE) * HUGE
    if libc.mmap(start, size, protection, _MAP_SHARED | _MAP_FIXED, descriptor, 0) != start:
        raise OSError(ctypes.get_errno(), "packed weights cannot be mapped")
    return start


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    for name, last in (("madvise", ctypes.c_int), ("mprotect", ctypes.c_int)):
        getattr(libc, name).argtypes = (ctypes.c_void_p, ctypes.c_size_t, last)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
