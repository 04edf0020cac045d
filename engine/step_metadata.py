"""What one step's tensors and attention need, built once on the host from a StepBatch."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from engine.step import BatchSequence, StepBatch


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's rows of the flattened step: rows [row, row + count) are its tokens [start, start + count)."""

    row: int
    count: int
    start: int
    block_ids: tuple[int, ...]
    prompt_length: int = 0

    @property
    def kv_length(self) -> int:
        """Tokens of KV after the step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The same for native kernels: int32 arrays on the host, one entry a sequence but for `blocks` and `slots`.

    Sequence i has rows query_ends[i - 1] to query_ends[i] and blocks[table_ends[i - 1]] to blocks[table_ends[i]].
    """

    query_ends: "array[int]"
    kv_lengths: "array[int]"
    table_ends: "array[int]"
    blocks: "array[int]"
    slots: "array[int]"  # [num_tokens]


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """One step's inputs on the device. A slot is one token's place in the pool: block * block_size + offset."""

    block_size: int
    spans: tuple[Span, ...]
    packed: PackedStep
    token_ids: torch.Tensor  # [1, num_tokens] int64
    positions: torch.Tensor  # [1, num_tokens] int64
    slots: torch.Tensor  # [num_tokens] int64
    sample_rows: torch.Tensor  # [num_samples] int64


def build(batch: StepBatch, *, block_size: int, device: torch.device) -> StepMetadata:
    """Lay out `batch`. A block table too short for its sequence is a defect of the caller (ValueError)."""
    sequences = batch.sequences
    query_ends = list(accumulate([sequence.count for sequence in sequences]))
    if (num_tokens := query_ends[-1] if query_ends else 0) != len(batch.token_ids):
        raise ValueError(f"the step has {len(batch.token_ids)} token ids for {num_tokens} rows")
    spans = tuple(map(_span, query_ends, sequences))
    positions, slots = _positions(sequences), _slots(sequences, block_size)
    return StepMetadata(
        block_size=block_size,
        spans=spans,
        packed=_pack(query_ends, sequences, slots),
        token_ids=_int64(batch.token_ids, device).unsqueeze(0),
        positions=_int64(positions, device).unsqueeze(0),
        slots=_int64(slots, device),
        sample_rows=_int64([sample.row for sample in batch.samples], device),
    )


def _span(end: int, sequence: BatchSequence) -> Span:
    return Span(end - sequence.count, sequence.count, sequence.start, sequence.block_ids, sequence.prompt_length)


def _pack(query_ends: Sequence[int], sequences: Sequence[BatchSequence], slots: Sequence[int]) -> PackedStep:
    tables = [sequence.block_ids for sequence in sequences]
    return PackedStep(
        query_ends=array("i", query_ends),
        kv_lengths=array("i", [sequence.start + sequence.count for sequence in sequences]),
        table_ends=array("i", accumulate(map(len, tables))),
        blocks=array("i", list(chain.from_iterable(tables))),
        slots=array("i", slots),
    )


def _positions(sequences: Sequence[BatchSequence]) -> list[int]:
    positions: list[int] = []
    for sequence in sequences:
        if sequence.count == 1:
            positions.append(sequence.start)
        else:
            positions += range(sequence.start, sequence.start + sequence.count)
    return positions


def _slots(sequences: Sequence[BatchSequence], block_size: int) -> list[int]:
    slots: list[int] = []
    for sequence in sequences:
        blocks, token = sequence.block_ids, sequence.start
        end = token + sequence.count
        if end > len(blocks) * block_size:
            raise ValueError(f"{len(blocks)} blocks of {block_size} cannot hold {end} tokens")
        if sequence.count == 1:  # decode: as little Python as can be
            slots.append(blocks[token // block_size] * block_size + token % block_size)
            continue
        while token < end:
            offset = token % block_size
            count = min(block_size - offset, end - token)
            first = blocks[token // block_size] * block_size + offset
            slots += range(first, first + count)
            token += count
    return slots


def _int64(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)
