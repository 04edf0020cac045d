"""How much of its pool an instance gives to finished KV that waits for its receivers: one rule for both ends."""


def hold_limit(pool: int) -> int:
    """Return the blocks (or tokens) of a pool that held KV may take before no new prompt is prefilled: half of it."""
    return max(1, pool // 2)
