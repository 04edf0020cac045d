"""Split a step's output among its pieces, in the order in which engine/assembly.py built the batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.assembly import pooled_tokens, scored_positions
from engine.prompt import ScheduledTokens
from engine.step import StepBatch, StepOutput
from wire.errors import InternalError, PdserveError
from wire.types import PromptLogprobs, TokenLogprobs


@dataclass(slots=True)
class PieceOutput:
    """A step's output for one piece: its rows from `row` on, and log probabilities of prompt tokens.

    `failure`: an error of any of its rows; the prompt fails with it.
    """

    row: int
    prompt_logprobs: PromptLogprobs | None = None
    failure: PdserveError | None = None
    pooled: Sequence[float] = ()


def read_output(output: StepOutput, batch: StepBatch, pieces: Sequence[ScheduledTokens]) -> list[PieceOutput]:
    """Return each piece's part. Raises InternalError if the output does not have the entries the batch requires."""
    _check_counts(output, batch)
    failures, scores, pooled = dict(output.failures), iter(output.scores), iter(output.pooled)
    parts, row = [], 0
    for piece in pieces:
        part = PieceOutput(row)
        row += len(piece.sampled) if piece.reaches_end else 0
        if failures:
            part.failure = next((failures[own] for own in range(part.row, row) if own in failures), None)
        if piece.sequence is piece.prompt.stem:
            _read_prompt(piece, part, output.score_failure, scores, pooled)
        parts.append(part)
    return parts


def _read_prompt(
    piece: ScheduledTokens, part: PieceOutput, score_failure: PdserveError | None, scores: Iterator[TokenLogprobs],
    pooled: Iterator[Sequence[float]],
) -> None:  # fmt: skip
    """Read the output for a prompt's own tokens: its log probabilities and pooled vector."""
    scored = scored_positions(piece)
    if scored and score_failure is not None:
        part.failure = part.failure or score_failure
        return
    part.prompt_logprobs = _prompt_logprobs(piece, tuple(next(scores) for _ in scored))
    part.pooled = next(pooled) if pooled_tokens(piece) else ()


def _check_counts(output: StepOutput, batch: StepBatch) -> None:
    num_scores = 0 if output.score_failure is not None else len(batch.scores)
    if len(output.pooled) != len(batch.pooling_rows):
        raise InternalError(f"the model returned {len(output.pooled)} vectors instead of {len(batch.pooling_rows)}")
    if len(output.token_ids) != len(batch.samples) or len(output.scores) != num_scores:
        raise InternalError(
            f"the model returned {len(output.token_ids)} tokens and {len(output.scores)} scores instead of "
            f"{len(batch.samples)} tokens and {num_scores} scores"
        )


def _prompt_logprobs(piece: ScheduledTokens, scores: tuple[TokenLogprobs, ...]) -> PromptLogprobs | None:
    """Return the piece's prompt log probabilities; token 0 has none, and its None precedes those of the first piece."""
    prompt_id, start = piece.prompt.state.prompt_id, piece.start
    requested = piece.prompt.state.params.prompt_logprobs is not None and piece.sequence is piece.prompt.stem
    if requested and start == 0 and not any(sequence.num_outputs for sequence in piece.prompt.sequences):
        return PromptLogprobs(prompt_id, 0, (None, *scores))
    return PromptLogprobs(prompt_id, start + 1, scores) if scores else None
