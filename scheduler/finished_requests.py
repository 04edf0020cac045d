"""Counts the outcomes of requests: every accepted one finishes exactly once."""

from dataclasses import dataclass

from wire.errors import Overloaded, PdserveError
from wire.types import Role

OF_PROMPTS, OF_TOKENS, OF_FIRST_TOKEN = QUEUE_LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens", "ttft_limit")
"""The limits of the queue, the first two in vLLM's spelling."""


@dataclass(slots=True)
class FinishedRequests:
    """Counters since the start. Written only by dispatch, its attempts and its claims.

    received = completed + failed + cancelled + inflight. `rejected` requests were never accepted; those over one of the
    QUEUE_LIMITS are in `rejected_by` too. Probes are not counted. `retried_tokens` are those of the `retried_prompts`
    and of their outputs so far; `delayed_retries` had to wait for the budget. `differing_outputs` were generated again,
    and differed from what the client had. `run_again`: requests with an
    Idempotency-Key that ran twice (request_claims.py). `without_prefill` and `without_decode` prompts were served by an
    instance alone because no instance of that role was living.
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
    run_again: int = 0
    without_prefill: int = 0
    without_decode: int = 0
    rejected_by: tuple[int, ...] = (0,) * len(QUEUE_LIMITS)

    def reject(self, error: PdserveError) -> None:
        """Count a request that is not accepted."""
        self.rejected += 1
        limit = error.limit if isinstance(error, Overloaded) else ""
        self.rejected_by = tuple(n + (name == limit) for name, n in self.rejections.items())

    @property
    def rejections(self) -> dict[str, int]:
        """The number of requests over each limit of the queue."""
        return dict(zip(QUEUE_LIMITS, self.rejected_by, strict=True))

    def serve_without(self, role: Role | None) -> None:
        """Count a prompt served without a hand-off because `role` is gone; None: for another reason, or with one."""
        self.without_prefill += role is Role.PREFILL
        self.without_decode += role is Role.DECODE

    @property
    def served_without(self) -> dict[str, int]:
        """The number of prompts served while a role was gone, by that role."""
        return {Role.PREFILL.value: self.without_prefill, Role.DECODE.value: self.without_decode}

    @property
    def inflight(self) -> int:
        """Requests accepted and not finished."""
        return self.received - self.completed - self.failed - self.cancelled
