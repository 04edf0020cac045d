"""The native kernels for a model: a team of threads that runs them, or the reason to use torch instead."""

from dataclasses import dataclass

from engine.fused import structs
from native import attention
from native.cache import NoNative
from native.engine_library import Threads, find_engine


@dataclass(frozen=True, slots=True)
class Kernels:
    """`threads` run the kernels; None if torch is used instead, for the reason in `note`.

    `is_awaited`: the kernels are being built, and the next start will have them.
    """

    threads: Threads | None
    is_awaited: bool
    note: str


NO_KERNELS = Kernels(None, False, "")
"""What devices other than the CPU have."""


def find_kernels(num_threads: int) -> Kernels:
    """Start `num_threads` threads if the kernels are built; else start building them, without waiting."""
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
