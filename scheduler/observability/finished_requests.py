"""Counts the outcomes of requests: every accepted one finishes exactly once."""

from dataclasses import dataclass


@dataclass(slots=True)
class FinishedRequests:
    """Counters since the start. Written only by dispatch and its attempts.

    received = completed + failed + cancelled + inflight. `rejected` requests were never accepted; probes are not
    counted. Of the `retried_prompts`, `delayed_retries` had to wait for the budget.
    """

    received: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    rejected: int = 0
    retried_prompts: int = 0
    delayed_retries: int = 0

    @property
    def inflight(self) -> int:
        """Requests accepted and not finished."""
        return self.received - self.completed - self.failed - self.cancelled
