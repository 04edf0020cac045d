"""Collects the results of one step."""

from dataclasses import dataclass, field

from engine.interface import PooledPrompt, Prefilled, StepResult
from telemetry.logs import EventLogger
from wire.errors import InternalError, InvalidRequest, NoCapacity
from wire.types import PromptLogprobs, PromptState, TokenOutput

_log = EventLogger("engine")


@dataclass(slots=True)
class StepOutcome:
    """Mutable, owned by the core for one step. The lists are those of StepResult."""

    tokens: list[TokenOutput] = field(default_factory=list)
    prefilled: list[Prefilled] = field(default_factory=list)
    failed: list[tuple[str, Exception]] = field(default_factory=list)
    first_steps: list[tuple[str, float]] = field(default_factory=list)
    computed: list[tuple[str, float, int, int]] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    progressed: list[str] = field(default_factory=list)
    pooled: list[PooledPrompt] = field(default_factory=list)
    interrupted: list[tuple[str, int, int]] = field(default_factory=list)
    num_tokens: int = 0
    num_served: int = 0

    def fail(self, state: PromptState, error: Exception) -> None:
        """Record and log a failed prompt: InvalidRequest and NoCapacity as they are, others as an InternalError."""
        ids = {"prompt_id": state.prompt_id, "request_id": state.request_id}
        if isinstance(error, InvalidRequest | NoCapacity):
            _log.info("prompt_rejected", **ids, error=error)
            self.failed.append((state.prompt_id, error))
            return
        _log.error("prompt_failed", error, **ids)
        failure = InternalError(f"the step of this prompt failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self.failed.append((state.prompt_id, failure))

    def result(self, seconds: float) -> StepResult:
        """Return the step's result."""
        return StepResult(
            tokens=tuple(self.tokens),
            prefilled=tuple(self.prefilled),
            failed=tuple(self.failed),
            first_steps=tuple(self.first_steps),
            computed=tuple(self.computed),
            seconds=seconds,
            prompt_logprobs=tuple(self.prompt_logprobs),
            progressed=tuple(dict.fromkeys(self.progressed)),
            pooled=tuple(self.pooled),
            interrupted=tuple(self.interrupted),
            num_tokens=self.num_tokens,
            num_served=self.num_served,
        )
