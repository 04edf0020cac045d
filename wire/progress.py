"""How long an engine may show no progress before it is stuck: one rule for the instance's health and the scheduler."""

SLOW_TURNS = 4.0
MOST_S = 120.0


def progress_limit(slowest_turn_s: float, *, least_s: float) -> float:
    """Return the limit in seconds: `least_s`, or SLOW_TURNS times the slowest turn (at most MOST_S) if that is more."""
    return max(least_s, min(SLOW_TURNS * slowest_turn_s, MOST_S))
