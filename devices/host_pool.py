"""A KV pool in host memory: one sealed memfd that peers on this host can map read-only.

Rank 0 makes the pools of the other ranks. Each rank maps its pool before the seal, so only that rank and rank 0 can
write to the pool.
"""

import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Self

from wire.errors import ConfigError
from wire.kv_layout import PoolLayout

# Linux, include/uapi/linux/fcntl.h; Python's fcntl module does not name F_SEAL_FUTURE_WRITE everywhere.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 0x01, 0x02, 0x04, 0x10


class HostPool:
    """Owns the memory of one pool. Only two mappings, made before the seal, are writable: ours and the rank's own."""

    def __init__(self, layout: PoolLayout, share: Callable[[int], None] | None = None) -> None:
        """Reserve `layout.total_bytes`; a page uses memory once written. Raises ConfigError if that fails.

        `share(fd)` is called before the seal and returns once the pool's rank has mapped it.
        """
        fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            mapping = _make_mapping(fd, layout)
            if share is not None:
                share(fd)
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | _F_SEAL_SEAL)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"cannot make a KV pool of {layout.total_bytes} bytes on this host: {error}") from error
        except BaseException:
            os.close(fd)
            raise
        self._set_memory(layout, fd, mapping)

    @classmethod
    def join(cls, layout: PoolLayout, fd: int) -> Self:
        """Map the pool that rank 0 made for this rank and has not sealed yet. Takes over `fd`. Raises ConfigError."""
        size = os.fstat(fd).st_size
        if size != layout.total_bytes:
            os.close(fd)
            raise ConfigError(f"rank 0 made a KV pool of {size} bytes, but this rank needs {layout.total_bytes}")
        pool = cls.__new__(cls)
        pool._set_memory(layout, fd, _map(fd, layout))
        return pool

    def _set_memory(self, layout: PoolLayout, fd: int, mapping: mmap.mmap) -> None:
        self.layout, self._fd, self._mapping = layout, fd, mapping
        self._buffer = memoryview(mapping)
        self._open = True

    @property
    def fd(self) -> int | None:
        """The sealed memfd, closed by `close`."""
        return self._fd

    @property
    def buffer(self) -> memoryview:
        """The whole pool as writable bytes."""
        return self._buffer

    def close(self) -> None:
        """Release the memory. Idempotent. Views made from `buffer` keep the mapping alive until they are freed."""
        if not self._open:
            return
        self._open = False
        os.close(self._fd)
        try:
            self._buffer.release()
            self._mapping.close()
        except BufferError:
            return  # a tensor or slice still refers to it; freeing the last one unmaps it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _make_mapping(fd: int, layout: PoolLayout) -> mmap.mmap:
    try:
        os.ftruncate(fd, layout.total_bytes)
    except OverflowError as error:
        raise ConfigError(f"cannot make a KV pool of {layout.total_bytes} bytes on this host: {error}") from error
    return _map(fd, layout)


def _map(fd: int, layout: PoolLayout) -> mmap.mmap:
    try:
        return mmap.mmap(fd, layout.total_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"cannot make a KV pool of {layout.total_bytes} bytes on this host: {error}") from error
