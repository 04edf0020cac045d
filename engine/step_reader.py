"""Deal out what a step made to the pieces that asked for it, in the order in which engine/assembly.py asked."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.assembly import scored_positions
from engine.interface import StepBatch, StepOutput
from engine.roster import Piece
from wire.errors import InternalError, PdserveError
from wire.types import PromptLogprobs, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Chosen:
    """What came of one sampled row: a token, or the reason why there is none."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    failure: PdserveError | None = None


@dataclass(frozen=True, slots=True)
class PieceOutput:
    """What a step made for one piece: a token for each of its sequences sampled, and how likely its prompt is."""

    chosen: tuple[Chosen, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None


def read_output(output: StepOutput, batch: StepBatch, pieces: Sequence[Piece]) -> list[PieceOutput]:
    """Return each piece's part. Raises InternalError if the model returned more or less than it was asked."""
    num_rows, num_scores = len(batch.samples), len(batch.scores)
    if len(output.token_ids) != num_rows or len(output.scores) != num_scores:
        raise InternalError(
            f"the model returned {len(output.token_ids)} tokens and {len(output.scores)} scores for {num_rows} rows "
            f"and {num_scores} scores"
        )
    failures = dict(output.failures)
    logprobs = output.logprobs or (None,) * num_rows
    chosen = iter(Chosen(token_id, logprobs[row], failures.get(row)) for row, token_id in enumerate(output.token_ids))
    scores = iter(output.scores)
    return [
        PieceOutput(
            tuple(next(chosen) for _ in (piece.sampled if piece.reaches_end else ())),
            _prompt_logprobs(piece, tuple(next(scores) for _ in scored_positions(piece))),
        )
        for piece in pieces
    ]


def _prompt_logprobs(piece: Piece, scores: tuple[TokenLogprobs, ...]) -> PromptLogprobs | None:
    """Return what the piece tells of its prompt; nothing precedes token 0, so it comes with those after it."""
    prompt_id, start = piece.prompt.state.prompt_id, piece.sequence.num_computed
    asked = piece.prompt.state.params.prompt_logprobs is not None and piece.sequence is piece.prompt.stem
    if asked and start == 0 and not any(sequence.num_outputs for sequence in piece.prompt.sequences):
        return PromptLogprobs(prompt_id, 0, (None, *scores))
    return PromptLogprobs(prompt_id, start + 1, scores) if scores else None
