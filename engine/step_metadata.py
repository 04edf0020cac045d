"""What one step's tensors and attention need, built once on the host from a StepBatch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.interface import BatchSequence, StepBatch


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's rows of the flattened step: rows [row, row + count) are its tokens [start, start + count)."""

    row: int
    count: int
    start: int
    block_ids: tuple[int, ...]

    @property
    def kv_length(self) -> int:
        """Tokens of KV after the step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Rows [row, row + count) go to pool slots [slot, slot + count)."""

    row: int
    slot: int
    count: int


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """One step's inputs on the device. A slot is one token's place in the pool: block * block_size + offset."""

    block_size: int
    spans: tuple[Span, ...]
    slot_runs: tuple[SlotRun, ...]
    token_ids: torch.Tensor  # [1, num_tokens] int64
    positions: torch.Tensor  # [1, num_tokens] int64
    slots: torch.Tensor  # [num_tokens] int64
    sample_rows: torch.Tensor  # [num_samples] int64


def build(batch: StepBatch, *, block_size: int, device: torch.device) -> StepMetadata:
    """Lay out `batch`. A block table too short for its sequence is a defect of the caller (ValueError)."""
    spans = tuple(_spans(batch.sequences))
    num_tokens = sum(span.count for span in spans)
    if num_tokens != len(batch.token_ids):
        raise ValueError(f"the step has {len(batch.token_ids)} token ids for {num_tokens} rows")
    runs = tuple(_join(run for span in spans for run in _runs(span, block_size)))
    positions = [position for span in spans for position in range(span.start, span.kv_length)]
    slots = [slot for run in runs for slot in range(run.slot, run.slot + run.count)]
    return StepMetadata(
        block_size=block_size,
        spans=spans,
        slot_runs=runs,
        token_ids=_int64(batch.token_ids, device).unsqueeze(0),
        positions=_int64(positions, device).unsqueeze(0),
        slots=_int64(slots, device),
        sample_rows=_int64([sample.row for sample in batch.samples], device),
    )


def _spans(sequences: Sequence[BatchSequence]) -> Iterator[Span]:
    row = 0
    for sequence in sequences:
        yield Span(row, sequence.count, sequence.start, sequence.block_ids)
        row += sequence.count


def _runs(span: Span, block_size: int) -> Iterator[SlotRun]:
    if span.kv_length > len(span.block_ids) * block_size:
        raise ValueError(f"{len(span.block_ids)} blocks of {block_size} cannot hold {span.kv_length} tokens")
    token = span.start
    while token < span.kv_length:
        offset = token % block_size
        count = min(block_size - offset, span.kv_length - token)
        yield SlotRun(span.row + token - span.start, span.block_ids[token // block_size] * block_size + offset, count)
        token += count


def _join(runs: Iterator[SlotRun]) -> Iterator[SlotRun]:
    """Join neighbours in the pool; rows always follow each other."""
    pending: SlotRun | None = None
    for run in runs:
        if pending is not None and pending.slot + pending.count == run.slot:
            pending = SlotRun(pending.row, pending.slot, pending.count + run.count)
            continue
        if pending is not None:
            yield pending
        pending = run
    if pending is not None:
        yield pending


def _int64(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)
