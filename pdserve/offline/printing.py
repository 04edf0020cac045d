"""Print a vector as vLLM's examples do."""

from collections.abc import Sequence

_SHOWN = 16


def print_embeddings(embedding: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first numbers of a vector and its size."""
    shown = ", ".join(map(str, embedding[:_SHOWN]))
    more = ", ..." if len(embedding) > _SHOWN else ""
    print(f"{prefix}: [{shown}{more}] (size={len(embedding)})")
