"""Turn the scheduled tokens of one step into the model's batch and into layer notifications for the KV senders."""

from array import array
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from engine.finish import banned_tokens
from engine.grid_positions import positions_of_text
from engine.interface import Chunk, OnLayer
from engine.prompt import ScheduledTokens
from engine.sequence import Sequence
from engine.step import BatchSequence, EmbeddedRows, PoolingRows, SampleRow, ScoreRow, StepBatch
from engine.token_counts import has_penalty
from engine.whole_images import spans_within

UNKNOWN = 0
"""Placeholder for a token that the previous step samples: the model fills it in (StepBatch.carried)."""


def batch_of(schedule: list[ScheduledTokens], awaited: Mapping[Sequence, int] = MappingProxyType({})) -> StepBatch:
    """Return the flattened step: all tokens, each sequence's token range, and the rows to sample, score and pool.

    `awaited` has, for each sequence whose last token the previous step samples, that sample's index in that step.
    """
    token_ids: list[int] = []
    carried: list[tuple[int, int]] = []
    samples: list[SampleRow] = []
    scores: list[ScoreRow] = []
    pooling_rows: list[PoolingRows] = []
    embedded: list[EmbeddedRows] = []
    for scheduled in schedule:
        prompt, sequence = scheduled.prompt, scheduled.sequence
        if sequence is prompt.stem:
            pooling_rows.extend(_pooling_rows(scheduled, len(token_ids)))
            scores.extend(_score_rows(scheduled, len(token_ids)))
            if prompt.images is not None:
                embedded.extend(prompt.images.within(scheduled.start, scheduled.count, len(token_ids)))
        token_ids += sequence.next_tokens(scheduled.count)
        if sequence.num_awaited:
            carried.append((len(token_ids), awaited[sequence]))
            token_ids.append(UNKNOWN)
        if scheduled.reaches_end:
            for index in scheduled.sampled:
                chosen = prompt.sampled(index) if sequence is prompt.stem else sequence
                samples.append(_sample_row(scheduled, index, chosen, len(token_ids) - 1))
    parts = tuple([_part(scheduled) for scheduled in schedule])
    return StepBatch(
        tuple(token_ids), parts, tuple(samples), tuple(scores), tuple(pooling_rows), tuple(carried), tuple(embedded),
        _positions(schedule, parts),
    )  # fmt: skip


def _part(scheduled: ScheduledTokens) -> BatchSequence:
    part, prompt = scheduled.sequence.part(scheduled.count), scheduled.prompt
    if prompt.spans and scheduled.sequence is prompt.stem:
        part.spans = spans_within(prompt.spans, scheduled.start, scheduled.count)
    return part


def _positions(schedule: list[ScheduledTokens], parts: tuple[BatchSequence, ...]) -> "array[int] | None":
    if all(scheduled.prompt.positions is None for scheduled in schedule):
        return None
    made = array("i")
    for scheduled, part in zip(schedule, parts, strict=True):
        positions = scheduled.prompt.positions
        of = positions_of_text if positions is None else positions.of
        made.extend(of(part.start, part.count))
    return made


def samples_of(schedule: list[ScheduledTokens]) -> dict[Sequence, int]:
    """Return the index of each sequence's sample in the step with this schedule; stems have none: they fork later."""
    samples, number = dict[Sequence, int](), 0
    for scheduled in schedule:
        if scheduled.reaches_end:
            if scheduled.sequence is not scheduled.prompt.stem:
                samples[scheduled.sequence] = number
            number += len(scheduled.sampled)
    return samples


def scored_positions(scheduled: ScheduledTokens) -> range:
    """Return the prompt positions whose log probabilities are computed: the position after each scheduled token.

    Empty if none were requested, or if there is an output token: those of the prompt were emitted before it.
    """
    prompt, sequence = scheduled.prompt, scheduled.sequence
    if prompt.state.params.prompt_logprobs is None or sequence is not prompt.stem:
        return range(0)
    if any(other.num_outputs for other in prompt.sequences):
        return range(0)
    first = scheduled.start + 1
    return range(first, min(first + scheduled.count, len(sequence.token_ids)))


def pooled_tokens(scheduled: ScheduledTokens) -> range:
    """Return the positions of the scheduled tokens whose hidden states are pooled into the prompt's vector."""
    collected, sequence = scheduled.prompt.collected, scheduled.sequence
    if collected is None:
        return range(0)
    return collected.wanted(scheduled.start, scheduled.count, len(sequence.token_ids))


class LayerAnnouncer:
    """Calls `on_layer` with one step's chunks of the prompts whose KV will be handed off.

    Stores the callback's error, which fails only those prompts.
    """

    def __init__(self, schedule: list[ScheduledTokens], on_layer: OnLayer | None) -> None:
        self._chunks = tuple(_chunk_of(scheduled) for scheduled in schedule if scheduled.prompt.hold)
        self._on_layer = on_layer
        self.error: Exception | None = None

    def is_wanted(self, *, runs_ahead: bool) -> bool:
        """Return whether `on_layer` has to be called. Layers without chunks are reported too, as a sign of progress.

        Where the model runs ahead, layers without chunks are not reported: launching a layer is not progress yet.
        """
        return self._on_layer is not None and bool(self._chunks or not runs_ahead)

    def __call__(self, layer: int) -> None:
        if self._on_layer is None or self.error is not None:
            return
        try:
            self._on_layer(layer, self._chunks)
        except Exception as error:  # noqa: BLE001 - after the step, fails only the prompts to hand off
            self.error = error


def _sample_row(scheduled: ScheduledTokens, index: int, sequence: Sequence, row: int) -> SampleRow:
    prompt, params = scheduled.prompt, scheduled.prompt.state.params
    position, history = sequence.num_outputs + sequence.num_awaited, sequence.token_ids
    may_ban = params.bad_words or position < params.min_tokens
    banned = banned_tokens(params, position, history) if may_ban else ()
    candidates = 0 if prompt.beams is None else prompt.beams.num_candidates
    counts = sequence.counted() if has_penalty(params) else None
    return SampleRow(
        row, params, index, position, banned, history, sequence.prompt_length, sequence.mask, candidates, counts
    )


def _pooling_rows(scheduled: ScheduledTokens, row: int) -> Iterator[PoolingRows]:
    """Yield the rows to pool; `row` is the flattened row of the first scheduled token."""
    tokens, pooling = pooled_tokens(scheduled), scheduled.prompt.state.pooling
    if tokens:
        each = pooling is not None and pooling.of_tokens
        yield PoolingRows(row + tokens.start - scheduled.start, len(tokens), each)


def _score_rows(scheduled: ScheduledTokens, row: int) -> Iterator[ScoreRow]:
    """Yield the scored rows; `row` is the flattened row of the first scheduled token."""
    params, token_ids = scheduled.prompt.state.params, scheduled.sequence.token_ids
    for place, position in enumerate(scored_positions(scheduled)):
        yield ScoreRow(row + place, token_ids[position], params.wanted_at(position, len(token_ids)))


def _chunk_of(scheduled: ScheduledTokens) -> Chunk:
    """Return the chunk to report; the first one includes the tokens that were found in the prefix cache."""
    sequence = scheduled.sequence
    start = 0 if scheduled.start == sequence.num_cached else scheduled.start
    return Chunk(scheduled.prompt.state.prompt_id, start, scheduled.start + scheduled.count, tuple(sequence.block_ids))
