"""Turn the pieces of one step into the model's batch and into layer notifications for the KV senders."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from engine.finish import banned_tokens
from engine.interface import Chunk, OnLayer
from engine.prompt import ScheduledTokens
from engine.sequence import Sequence
from engine.step import PoolingRows, SampleRow, ScoreRow, StepBatch
from engine.token_counts import has_penalty

UNKNOWN = 0
"""Placeholder for a token that the previous step samples: the model fills it in (StepBatch.carried)."""


def batch_of(pieces: list[ScheduledTokens], awaited: Mapping[Sequence, int] = MappingProxyType({})) -> StepBatch:
    """Return the flattened step: all tokens, each piece's token range, and the rows to sample, score and pool.

    `awaited` maps sequences whose last token the previous step samples to the index of that sample there.
    """
    token_ids: list[int] = []
    carried: list[tuple[int, int]] = []
    samples: list[SampleRow] = []
    scores: list[ScoreRow] = []
    pooling_rows: list[PoolingRows] = []
    for piece in pieces:
        prompt, sequence = piece.prompt, piece.sequence
        if sequence is prompt.stem:
            pooling_rows.extend(_pooling_rows(piece, len(token_ids)))
            scores.extend(_score_rows(piece, len(token_ids)))
        token_ids += sequence.next_tokens(piece.count)
        if sequence.num_awaited:
            carried.append((len(token_ids), awaited[sequence]))
            token_ids.append(UNKNOWN)
        if piece.reaches_end:
            for index in piece.sampled:
                chosen = prompt.sampled(index) if sequence is prompt.stem else sequence
                samples.append(_sample_row(piece, index, chosen, len(token_ids) - 1))
    parts = tuple([piece.sequence.part(piece.count) for piece in pieces])
    return StepBatch(tuple(token_ids), parts, tuple(samples), tuple(scores), tuple(pooling_rows), tuple(carried))


def samples_of(pieces: list[ScheduledTokens]) -> dict[Sequence, int]:
    """Return the index of each sequence's sample in the step of these pieces; none for stems, which fork before."""
    samples, number = dict[Sequence, int](), 0
    for piece in pieces:
        if piece.reaches_end:
            if piece.sequence is not piece.prompt.stem:
                samples[piece.sequence] = number
            number += len(piece.sampled)
    return samples


def scored_positions(piece: ScheduledTokens) -> range:
    """Return the prompt positions whose log probabilities this piece computes: the ones after each of its tokens.

    Empty if none were requested, or if there is an output token: the prompt's were emitted before it.
    """
    prompt, sequence = piece.prompt, piece.sequence
    if prompt.state.params.prompt_logprobs is None or sequence is not prompt.stem:
        return range(0)
    if any(other.num_outputs for other in prompt.sequences):
        return range(0)
    first = piece.start + 1
    return range(first, min(first + piece.count, len(sequence.token_ids)))


def pooled_tokens(piece: ScheduledTokens) -> range:
    """Return the positions of the piece's tokens whose hidden states are pooled into the prompt's vector."""
    collected, sequence = piece.prompt.collected, piece.sequence
    if collected is None:
        return range(0)
    return collected.wanted(piece.start, piece.count, len(sequence.token_ids))


class LayerAnnouncer:
    """Calls `on_layer` with one step's chunks of the prompts whose KV will be handed off.

    Stores its error, which fails only those prompts.
    """

    def __init__(self, pieces: list[ScheduledTokens], on_layer: OnLayer | None) -> None:
        self._chunks = tuple(_chunk_of(piece) for piece in pieces if piece.prompt.hold)
        self._on_layer = on_layer
        self.error: Exception | None = None

    def is_wanted(self, *, runs_ahead: bool) -> bool:
        """Return whether `on_layer` has to be called. Layers without chunks are reported too, as a sign of progress.

        Not where the model runs ahead: launching a layer is not progress yet.
        """
        return self._on_layer is not None and bool(self._chunks or not runs_ahead)

    def __call__(self, layer: int) -> None:
        if self._on_layer is None or self.error is not None:
            return
        try:
            self._on_layer(layer, self._chunks)
        except Exception as error:  # noqa: BLE001 - ends the prompts to hand off after the step, not the others
            self.error = error


def _sample_row(piece: ScheduledTokens, index: int, sequence: Sequence, row: int) -> SampleRow:
    prompt, params = piece.prompt, piece.prompt.state.params
    position, history = sequence.num_outputs + sequence.num_awaited, sequence.token_ids
    may_ban = params.bad_words or position < params.min_tokens
    banned = banned_tokens(params, position, history) if may_ban else ()
    candidates = 0 if prompt.beams is None else prompt.beams.num_candidates
    counts = sequence.counted() if has_penalty(params) else None
    return SampleRow(
        row, params, index, position, banned, history, sequence.prompt_length, sequence.mask, candidates, counts
    )


def _pooling_rows(piece: ScheduledTokens, row: int) -> Iterator[PoolingRows]:
    """Yield the rows to pool of a piece whose first token is flattened row `row`."""
    tokens = pooled_tokens(piece)
    if tokens:
        yield PoolingRows(row + tokens.start - piece.start, len(tokens))


def _score_rows(piece: ScheduledTokens, row: int) -> Iterator[ScoreRow]:
    """Yield the scored rows of a piece whose first token is flattened row `row`."""
    top = piece.prompt.state.params.prompt_logprobs or 0
    for place, position in enumerate(scored_positions(piece)):
        yield ScoreRow(row + place, piece.sequence.token_ids[position], top)


def _chunk_of(piece: ScheduledTokens) -> Chunk:
    """Return the chunk to report; the first one includes the tokens that were found in the prefix cache."""
    sequence = piece.sequence
    start = 0 if piece.start == sequence.num_cached else piece.start
    return Chunk(piece.prompt.state.prompt_id, start, piece.start + piece.count, tuple(sequence.block_ids))
