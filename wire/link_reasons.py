"""Reasons in link statuses why a working KV transport is not used; any other reason means that it failed."""

NOT_OFFERED = "not offered there"
ELSEWHERE = "another host or network namespace"
IN_SET_UP = "its link is being set up"
UNMEASURED = "its link has not been measured yet"
_SLOWER = "slower than "


def slower_reason(than: str, bytes_per_s: float, bytes_per_s_of_other: float) -> str:
    """Return the reason of a transport that was measured to be slower than `than`."""
    return f"{_SLOWER}{than} ({bytes_per_s / 1e9:.2f} GB/s against {bytes_per_s_of_other / 1e9:.2f} GB/s)"


def is_slower(reason: str) -> bool:
    """Return whether the transport was measured to be slower than another."""
    return reason.startswith(_SLOWER)


def without_rates(reason: str) -> str:
    """Return the reason without the measured rates, so that it stays the same from one measurement to the next."""
    return reason.partition(" (")[0] if is_slower(reason) else reason


def is_failure(reason: str) -> bool:
    """Return whether the transport failed: it was tried, or was in use."""
    return reason not in (NOT_OFFERED, ELSEWHERE, IN_SET_UP, UNMEASURED) and not is_slower(reason)
