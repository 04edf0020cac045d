"""How much of its pool an instance may use for finished KV that waits for its receivers: one rule for both sides."""


def hold_limit(pool: int) -> int:
    """Return how many blocks (or tokens) held KV may take before prefilling new prompts stops: half the pool."""
    return max(1, pool // 2)
