"""Limits that the scheduler and an instance compute alike, each from its own figures."""

SLOW_TURNS = 4.0
MAX_S = 120.0
MAX_SCHEDULERS = 16
"""The limit for one cluster: an instance has a session with each scheduler."""
MAX_ORPHAN_S = 3600.0
"""The longest time for which a stream may be kept without an owner."""


def progress_limit(slowest_turn_s: float, *, least_s: float) -> float:
    """Return how long an engine may show no progress before it is stuck, in seconds.

    That is `least_s`, or SLOW_TURNS times the slowest turn (at most MAX_S) if that is more.
    """
    return max(least_s, min(SLOW_TURNS * slowest_turn_s, MAX_S))


def hold_limit(pool: int) -> int:
    """Return how many blocks (or tokens) of finished KV may wait before prefilling new prompts stops: half the pool."""
    return max(1, pool // 2)


def unused_positions(model_type: str, pad_token_id: object) -> int:
    """Return how many position embeddings stay unused: RoBERTa-like models number positions from the padding id + 1."""
    starts_later = "roberta" in model_type or model_type == "camembert"
    return pad_token_id + 1 if starts_later and isinstance(pad_token_id, int) else 0
