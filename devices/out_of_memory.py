"""Whether an error says that a device has no memory left. Imports no torch.

torch has a class for its allocator's own refusal; a driver that fails while it makes a graph, and torch_npu, say it in
words alone. A capture that ends after such an error raises one of its own, which has the first as its context.
"""

_WORDS = "out of memory"
_MOST_CAUSES = 8


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or one that it was raised from or behind, is of that sort."""
    found: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if found is None:
            return False
        if isinstance(found, (RuntimeError, MemoryError)) and _WORDS in str(found).lower():
            return True
        found = found.__cause__ or found.__context__
    return False
