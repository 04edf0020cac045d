"""Deal out what a step made to the pieces that asked for it, in the order in which engine/assembly.py asked."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.assembly import pooled_tokens, scored_positions
from engine.roster import Piece
from engine.step import Candidates, StepBatch, StepOutput
from wire.errors import InternalError, PdserveError
from wire.types import PromptLogprobs, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Chosen:
    """What came of one sampled row."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    candidates: Candidates | None = None


@dataclass(frozen=True, slots=True)
class PieceOutput:
    """What a step made for one piece: a token for each of its sequences sampled, and how likely its prompt is.

    `failure`: why not all of it was made; the prompt ends with it.
    """

    chosen: tuple[Chosen, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    failure: PdserveError | None = None
    pooled: Sequence[float] = ()


def read_output(output: StepOutput, batch: StepBatch, pieces: Sequence[Piece]) -> list[PieceOutput]:
    """Return each piece's part. Raises InternalError if the model returned more or less than it was asked."""
    _check_counts(output, batch)
    failures, logprobs = dict(output.failures), output.logprobs or (None,) * len(batch.samples)
    candidates = output.candidates or (None,) * len(batch.samples)
    rows = iter(range(len(batch.samples)))
    scores, pooled = iter(output.scores), iter(output.pooled)
    parts = []
    for piece in pieces:
        own = [next(rows) for _ in (piece.sampled if piece.reaches_end else ())]
        chosen = tuple(Chosen(output.token_ids[row], logprobs[row], candidates[row]) for row in own)
        failure = next((failures[row] for row in own if row in failures), None)
        scored = scored_positions(piece)
        if scored and output.score_failure is not None:
            parts.append(PieceOutput(failure=failure or output.score_failure))
        else:
            told = _prompt_logprobs(piece, tuple(next(scores) for _ in scored))
            parts.append(PieceOutput(chosen, told, failure, next(pooled) if pooled_tokens(piece) else ()))
    return parts


def _check_counts(output: StepOutput, batch: StepBatch) -> None:
    num_scores = 0 if output.score_failure is not None else len(batch.scores)
    if len(output.pooled) != len(batch.pools):
        raise InternalError(f"the model returned {len(output.pooled)} vectors for {len(batch.pools)}")
    if len(output.token_ids) != len(batch.samples) or len(output.scores) != num_scores:
        raise InternalError(
            f"the model returned {len(output.token_ids)} tokens and {len(output.scores)} scores for "
            f"{len(batch.samples)} rows and {num_scores} scores"
        )


def _prompt_logprobs(piece: Piece, scores: tuple[TokenLogprobs, ...]) -> PromptLogprobs | None:
    """Return what the piece tells of its prompt; nothing precedes token 0, so it comes with those after it."""
    prompt_id, start = piece.prompt.state.prompt_id, piece.sequence.num_computed
    asked = piece.prompt.state.params.prompt_logprobs is not None and piece.sequence is piece.prompt.stem
    if asked and start == 0 and not any(sequence.num_outputs for sequence in piece.prompt.sequences):
        return PromptLogprobs(prompt_id, 0, (None, *scores))
    return PromptLogprobs(prompt_id, start + 1, scores) if scores else None
