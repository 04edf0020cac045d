"""Counts the outcomes of requests: every accepted one finishes exactly once."""

from dataclasses import dataclass


@dataclass(slots=True)
class FinishedRequests:
    """Counters since the start. Written only by dispatch and its attempts.

    received = completed + failed + cancelled + inflight. `rejected` requests were never accepted; probes are not
    counted. `retried_tokens` are those of the `retried_prompts` and of their outputs so far; `delayed_retries` had to
    wait for the budget. `differing_outputs` were generated again, and differed from what the client had.
    """

    received: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    rejected: int = 0
    retried_prompts: int = 0
    retried_tokens: int = 0
    differing_outputs: int = 0
    delayed_retries: int = 0

    @property
    def inflight(self) -> int:
        """Requests accepted and not finished."""
        return self.received - self.completed - self.failed - self.cancelled
