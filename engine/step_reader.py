"""Split a step's output among its scheduled tokens, in the order in which engine/assembly.py built the batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.assembly import pooled_tokens, scored_positions
from engine.prompt import ScheduledTokens
from engine.step import StepBatch, StepOutput
from wire.errors import InternalError, PdserveError
from wire.types import PromptLogprobs, TokenLogprobs


@dataclass(slots=True)
class ScheduledOutput:
    """A step's output for one ScheduledTokens: its rows from `row` on, and log probabilities of prompt tokens.

    `failure`: an error of any of its rows; the prompt fails with it.
    """

    row: int
    prompt_logprobs: PromptLogprobs | None = None
    failure: PdserveError | None = None
    pooled: Sequence[float] = ()


def read_output(output: StepOutput, batch: StepBatch, schedule: Sequence[ScheduledTokens]) -> list[ScheduledOutput]:
    """Return the output of each ScheduledTokens. Raises InternalError for other entries than the batch requires."""
    _check_counts(output, batch)
    failures, scores, pooled = dict(output.failures), iter(output.scores), iter(output.pooled)
    parts, row = [], 0
    for scheduled in schedule:
        part = ScheduledOutput(row)
        row += len(scheduled.sampled) if scheduled.reaches_end else 0
        if failures:
            part.failure = next((failures[own] for own in range(part.row, row) if own in failures), None)
        if scheduled.sequence is scheduled.prompt.stem:
            _read_prompt(scheduled, part, output.score_failure, scores, pooled)
        parts.append(part)
    return parts


def _read_prompt(
    scheduled: ScheduledTokens, part: ScheduledOutput, score_failure: PdserveError | None,
    scores: Iterator[TokenLogprobs], pooled: Iterator[Sequence[float]],
) -> None:  # fmt: skip
    """Read the output for a prompt's own tokens: its log probabilities and pooled vector."""
    scored = scored_positions(scheduled)
    if scored and score_failure is not None:
        part.failure = part.failure or score_failure
        return
    part.prompt_logprobs = _prompt_logprobs(scheduled, tuple(next(scores) for _ in scored))
    part.pooled = next(pooled) if pooled_tokens(scheduled) else ()


def _check_counts(output: StepOutput, batch: StepBatch) -> None:
    num_scores = 0 if output.score_failure is not None else len(batch.scores)
    if len(output.pooled) != len(batch.pooling_rows):
        raise InternalError(f"the model returned {len(output.pooled)} vectors instead of {len(batch.pooling_rows)}")
    if len(output.token_ids) != len(batch.samples) or len(output.scores) != num_scores:
        raise InternalError(
            f"the model returned {len(output.token_ids)} tokens and {len(output.scores)} scores instead of "
            f"{len(batch.samples)} tokens and {num_scores} scores"
        )


def _prompt_logprobs(scheduled: ScheduledTokens, scores: tuple[TokenLogprobs, ...]) -> PromptLogprobs | None:
    """Return the prompt log probabilities of scheduled tokens; token 0 has none, so a None precedes the first ones."""
    prompt_id, start = scheduled.prompt.state.prompt_id, scheduled.start
    requested = (
        scheduled.prompt.state.params.prompt_logprobs is not None and scheduled.sequence is scheduled.prompt.stem
    )
    if requested and start == 0 and not any(sequence.num_outputs for sequence in scheduled.prompt.sequences):
        return PromptLogprobs(prompt_id, 0, (None, *scores))
    return PromptLogprobs(prompt_id, start + 1, scores) if scores else None
