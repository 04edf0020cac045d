"""Recognise errors of a device that is out of memory. Imports no torch.

torch has an exception class for its own allocator. torch_npu, and a driver that fails during a graph capture, report
a lack of memory only in the message of another error. Such a capture also raises a further error, whose context is
the error about memory.
"""

_WORDS = "out of memory"
_MAX_CAUSES = 8


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error`, or an error in its chain of causes and contexts, means out of memory."""
    found: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if found is None:
            return False
        if isinstance(found, (RuntimeError, MemoryError)) and _WORDS in str(found).lower():
            return True
        found = found.__cause__ or found.__context__
    return False
