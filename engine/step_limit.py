"""Time limit for all work queued on a device: the instance's step limit times the steps that may be queued.

A device that exceeds it is considered lost; one that computes long steps within the limit is not.
"""

DEFAULT_STEP_S = 10.0
"""The default of --rank-timeout, for an engine without an instance."""
_QUEUED_STEPS = 2
"""The engine launches at most one step ahead of the one being computed."""


def queued_s(step_s: float) -> float:
    """Return the time limit for all work queued on a device, where a step may take `step_s`."""
    return _QUEUED_STEPS * step_s
