"""The native kernels of a load: a team of threads that runs them, or why torch does their work."""

from dataclasses import dataclass

from engine.fused import structs
from native import attention
from native.cache import NoNative
from native.engine_library import Threads, find_engine


@dataclass(frozen=True, slots=True)
class Kernels:
    """`threads` run the kernels; None where torch does the work in this run, and `note` says why.

    `is_awaited`: the kernels are being built, and the next start will have them.
    """

    threads: Threads | None
    is_awaited: bool
    note: str


NO_KERNELS = Kernels(None, False, "")
"""Where the device is not the CPU."""


def find_kernels(num_threads: int) -> Kernels:
    """Start a team of `num_threads` threads if the kernels are there; let them be built if not. Never waits for it."""
    found = find_engine()
    if found.is_awaited:
        return Kernels(None, True, "torch instead of native kernels: they are being built for the next start")
    try:
        if found.library is None:
            raise NoNative(found.reason)
        structs.check_structs(found.library)
        attention.check_structs(found.library)
    except NoNative as error:
        return Kernels(None, False, f"torch instead of native kernels: {' '.join(str(error).split())}")
    threads = found.library.threads(num_threads)
    return Kernels(threads, False, f"native kernels with {threads.isa}")
