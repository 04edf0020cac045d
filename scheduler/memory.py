"""Return memory to the system after a burst: by default the process keeps freed memory for reuse."""

import asyncio
import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path

from telemetry.logs import EventLogger

_log = EventLogger("scheduler")

_POLL_S = 2.0
_GROWN_BYTES = 32 * 2**20
_STATM = Path("/proc/self/statm")
_M_ARENA_MAX = -8  # from malloc.h


async def give_back_memory(
    is_idle: Callable[[], bool],
    *,
    resident: Callable[[], int] | None = None,
    release: Callable[[], None] | None = None,
) -> None:
    """Release free memory whenever the process is idle and has grown by 32 MiB since the last time; never returns.

    Only when idle, because it blocks the process for about ten milliseconds.
    """
    resident, release = resident or resident_bytes, release or release_free
    before = resident()
    while True:
        await asyncio.sleep(_POLL_S)
        now = resident()
        if is_idle() and now > before + _GROWN_BYTES:
            release()
            _log.debug("memory_released", before_bytes=now, after_bytes=resident())
            now = before = resident()
        before = min(before, now)


def resident_bytes() -> int:
    """Return the process's resident memory in bytes; 0 if the system does not report it."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def release_free() -> None:
    """Collect garbage, and return free pages to the system if the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def share_one_arena() -> None:
    """Make future threads allocate from the main arena, unless MALLOC_ARENA_MAX is set; permanent.

    glibc gives each thread its own arena, and malloc_trim does not release an arena's free end: up to 64 MiB each.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None and "MALLOC_ARENA_MAX" not in os.environ:
        set_option(_M_ARENA_MAX, 1)
