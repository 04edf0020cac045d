"""How long what is queued on a device may take: the instance's limit of a step, for each step that may be queued.

A device that has not done it then is taken for lost; one that computes long steps within the limit is not.
"""

DEFAULT_STEP_S = 10.0
"""Of --rank-timeout, where an engine is made without an instance."""
_QUEUED_STEPS = 2
"""The engine launches one step behind the one that is computed, and no more."""


def queued_s(step_s: float) -> float:
    """Return how long a device may take for all that is queued on it, where a step may take `step_s`."""
    return _QUEUED_STEPS * step_s
