"""Turn the pieces of one step into what the model computes and what the senders of held prompts are told."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from engine.finish import banned_tokens
from engine.interface import Chunk, OnLayer
from engine.prompt import ScheduledTokens
from engine.sequence import Sequence
from engine.step import PoolRows, SampleRow, ScoreRow, StepBatch
from engine.token_counts import has_penalty

UNKNOWN = 0
"""Stands for a token that the step before chooses: the model puts it in (StepBatch.carried)."""


def batch_of(pieces: list[ScheduledTokens], awaited: Mapping[Sequence, int] = MappingProxyType({})) -> StepBatch:
    """Return the flattened step: all tokens, each piece's part, and the rows that are sampled and scored.

    `awaited` are the sequences whose last token the step before samples, with the numbers of these samples there.
    """
    token_ids: list[int] = []
    carried: list[tuple[int, int]] = []
    samples: list[SampleRow] = []
    scores: list[ScoreRow] = []
    pools: list[PoolRows] = []
    for piece in pieces:
        prompt, sequence = piece.prompt, piece.sequence
        if sequence is prompt.stem:
            pools.extend(_pool_rows(piece, len(token_ids)))
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
    return StepBatch(tuple(token_ids), parts, tuple(samples), tuple(scores), tuple(pools), tuple(carried))


def samples_of(pieces: list[ScheduledTokens]) -> dict[Sequence, int]:
    """Return the number of each sequence's sample in the step of these pieces; stems, which fork first, have none."""
    samples, number = dict[Sequence, int](), 0
    for piece in pieces:
        if piece.reaches_end:
            if piece.sequence is not piece.prompt.stem:
                samples[piece.sequence] = number
            number += len(piece.sampled)
    return samples


def scored_positions(piece: ScheduledTokens) -> range:
    """Return the prompt positions whose likelihood this piece tells: they follow its tokens.

    Empty where nobody asked, and where an output token is there: whoever knows it has heard of the prompt.
    """
    prompt, sequence = piece.prompt, piece.sequence
    if prompt.state.params.prompt_logprobs is None or sequence is not prompt.stem:
        return range(0)
    if any(other.num_outputs for other in prompt.sequences):
        return range(0)
    first = piece.start + 1
    return range(first, min(first + piece.count, len(sequence.token_ids)))


def pooled_tokens(piece: ScheduledTokens) -> range:
    """Return the prompt's tokens among the piece's whose hidden states its vector is made of."""
    collected, sequence = piece.prompt.collected, piece.sequence
    if collected is None:
        return range(0)
    return collected.wanted(piece.start, piece.count, len(sequence.token_ids))


class LayerAnnouncer:
    """Tells `on_layer` about the held prompts' chunks of one step; an error there is theirs alone, so it is kept."""

    def __init__(self, pieces: list[ScheduledTokens], on_layer: OnLayer | None) -> None:
        self._chunks = tuple(_chunk_of(piece) for piece in pieces if piece.prompt.hold)
        self._on_layer = on_layer
        self.error: Exception | None = None

    def is_wanted(self, *, runs_ahead: bool) -> bool:
        """Whether there is anyone to tell. A layer without chunks is told too, as the mark of progress.

        Not where the model runs ahead: a layer that is launched is no progress yet.
        """
        return self._on_layer is not None and bool(self._chunks or not runs_ahead)

    def __call__(self, layer: int) -> None:
        if self._on_layer is None or self.error is not None:
            return
        try:
            self._on_layer(layer, self._chunks)
        except Exception as error:  # noqa: BLE001 - ends the held prompts after the step, not the others
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


def _pool_rows(piece: ScheduledTokens, row: int) -> Iterator[PoolRows]:
    """Yield the rows that a piece, whose first token is flattened row `row`, gives to its prompt's vector."""
    tokens = pooled_tokens(piece)
    if tokens:
        yield PoolRows(row + tokens.start - piece.start, len(tokens))


def _score_rows(piece: ScheduledTokens, row: int) -> Iterator[ScoreRow]:
    """Yield the scored rows of a piece whose first token is flattened row `row`."""
    top = piece.prompt.state.params.prompt_logprobs or 0
    for place, position in enumerate(scored_positions(piece)):
        yield ScoreRow(row + place, piece.sequence.token_ids[position], top)


def _chunk_of(piece: ScheduledTokens) -> Chunk:
    """Return what is announced: what was found here is so with the first chunk computed."""
    sequence = piece.sequence
    start = 0 if piece.start == sequence.num_cached else piece.start
    return Chunk(piece.prompt.state.prompt_id, start, piece.start + piece.count, tuple(sequence.block_ids))
