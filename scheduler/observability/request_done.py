"""The record of a finished request, for the metrics, the log and the traces."""

from scheduler.request import GenerationRequest, PromptDone
from wire.cheap_dataclass import cheap_dataclass


@cheap_dataclass(frozen=True, slots=True)
class RequestDone:
    """One finished request. Times are seconds from its arrival, by the scheduler's own clock.

    `outcome` is finished, cancelled or failed; `error` the name of the error that failed it. `dispatched_s` is when the
    request had been read, rendered and tokenised; `first_token_s` and `last_token_s` are None if no token was sent.
    `reasons` has the finish reason of each finished sequence. `served` are the prompts whose hand-off is complete.
    """

    request: GenerationRequest
    served: tuple[PromptDone, ...]
    outcome: str
    seconds: float
    dispatched_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_output_tokens: int = 0
    reasons: tuple[str, ...] = ()
    error: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.request.prompts))

    @property
    def queue_s(self) -> float:
        """Time waiting for placement; with several prompts, the longest of their times."""
        return max((done.times.queue_s or 0.0 for done in self.served), default=0.0)

    @property
    def prefill_s(self) -> float | None:
        """Time from placement to the first token."""
        if self.first_token_s is None:
            return None
        return max(0.0, self.first_token_s - self.dispatched_s - self.queue_s)

    @property
    def decode_s(self) -> float | None:
        """Time from the first token to the last."""
        if self.first_token_s is None or self.last_token_s is None:
            return None
        return self.last_token_s - self.first_token_s
