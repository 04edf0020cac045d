"""A KV pool in host memory: one sealed memfd that peers on this host can map, and only read."""

import fcntl
import mmap
import os
from types import TracebackType
from typing import Self

from wire.errors import ConfigError
from wire.kv_layout import PoolLayout

# Linux, include/uapi/linux/fcntl.h; Python's fcntl module does not name F_SEAL_FUTURE_WRITE everywhere.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 0x01, 0x02, 0x04, 0x10


class HostPool:
    """Owns the memory of one pool. Our mapping is made before the seal and so is the only writable one, for ever."""

    def __init__(self, layout: PoolLayout) -> None:
        """Reserve `layout.total_bytes`; pages cost memory once written. Raises ConfigError where that is impossible."""
        self.layout = layout
        self._fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self._mapping = _map_and_seal(self._fd, layout.total_bytes)
        except (OSError, ValueError, OverflowError) as error:
            os.close(self._fd)
            raise ConfigError(f"no KV pool of {layout.total_bytes} bytes on this host: {error}") from error
        self._buffer = memoryview(self._mapping)
        self._open = True

    @property
    def fd(self) -> int | None:
        """The sealed memfd, ours to close."""
        return self._fd

    @property
    def buffer(self) -> memoryview:
        """The whole pool as writable bytes."""
        return self._buffer

    def close(self) -> None:
        """Give the memory back. Idempotent. Views made from `buffer` keep the mapping alive until they are gone."""
        if not self._open:
            return
        self._open = False
        os.close(self._fd)
        try:
            self._buffer.release()
            self._mapping.close()
        except BufferError:
            return  # a tensor or a slice still looks at it; the last one takes the mapping down

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _map_and_seal(fd: int, num_bytes: int) -> mmap.mmap:
    os.ftruncate(fd, num_bytes)
    mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | _F_SEAL_SEAL)
    except OSError:
        mapping.close()
        raise
    return mapping
