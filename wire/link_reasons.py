"""Why a KV transport that did not fail is not used, as link statuses report it; any other reason is a failure."""

NOT_OFFERED = "not offered there"
ELSEWHERE = "another host or network namespace"
IN_SET_UP = "its link is being set up"
UNMEASURED = "its link has not been measured yet"
SLOWER = "slower: "
"""Both rates follow."""


def is_failure(reason: str) -> bool:
    """Return whether the transport failed: it was tried, or was in use."""
    return reason not in (NOT_OFFERED, ELSEWHERE, IN_SET_UP, UNMEASURED) and not reason.startswith(SLOWER)
