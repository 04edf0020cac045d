"""How long an engine may show no progress before it is stuck: the instance's own health and the scheduler agree."""

SLOW_TURNS = 4.0
MOST_S = 120.0


def progress_limit(slowest_turn_s: float, *, least_s: float) -> float:
    """Return the seconds: `least_s`, or SLOW_TURNS of its slowest turns up to MOST_S where that is more."""
    return max(least_s, min(SLOW_TURNS * slowest_turn_s, MOST_S))
