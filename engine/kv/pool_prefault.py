"""Touch a pool's memory in the background after start, so that its page faults do not slow the first requests."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable

from devices.host_memory import available_bytes
from devices.interface import Memory
from telemetry.logs import EventLogger

_log = EventLogger("engine")

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14, include/uapi/asm-generic/mman-common.h
_PIECE_BYTES = 4 << 20
_LEFT_FREE_BYTES = 512 << 20
_LOWEST_PRIORITY = 19
_STOP_S = 1.0


class PoolTouch:
    """Owns the thread that touches one host pool, piece by piece, without the GIL, while enough memory is free."""

    def __init__(self, memory: Memory, *, available: Callable[[], int] = available_bytes) -> None:
        self._memory, self._available = memory, available
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool-touch", daemon=True)

    def start(self) -> None:
        """Start, if the pool is host memory."""
        if self._memory.fd is not None:
            self._thread.start()

    def stop(self) -> None:
        """Stop after the current piece."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; return whether it did in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # on Linux priorities are per thread; elsewhere nothing changes
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        try:
            touched = self._touch_pages()
        except OSError as error:  # an older kernel, or no memory: pages are faulted in at first use
            _log.info("pool_not_prefaulted", error=error)
        else:
            _log.info("pool_prefaulted", bytes=touched, of=self._memory.layout.total_bytes)

    def _touch_pages(self) -> int:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        pool = ctypes.c_char.from_buffer(self._memory.buffer)  # keeps the mapping alive meanwhile
        start, total = ctypes.addressof(pool), self._memory.layout.total_bytes
        for done in range(0, total, _PIECE_BYTES):
            if self._stopping.is_set() or self._available() < _LEFT_FREE_BYTES:
                return done
            if madvise(start + done, min(_PIECE_BYTES, total - done), _POPULATE_WRITE) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        return total
