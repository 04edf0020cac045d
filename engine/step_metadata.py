"""What one step's tensors and attention need, built once on the host from a StepBatch."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.step import BatchSequence, StepBatch

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The step for native kernels: int32 arrays on the host, one entry a sequence but for `blocks` and `slots`.

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
    sequences: Sequence[BatchSequence]
    packed: PackedStep
    token_ids: torch.Tensor  # [1, num_tokens] int64
    positions: torch.Tensor  # [1, num_tokens] int64
    slots: torch.Tensor  # [num_tokens] int64
    sample_rows: torch.Tensor  # [num_samples] int64

    def rows(self) -> Iterator[tuple[slice, BatchSequence]]:
        """Yield each sequence behind its rows of the flattened step."""
        for end, sequence in zip(self.packed.query_ends, self.sequences, strict=True):
            yield slice(end - sequence.count, end), sequence


def build(batch: StepBatch, *, block_size: int, device: torch.device) -> StepMetadata:
    """Lay out `batch`. A block table too short for its sequence is a defect of the caller (ValueError)."""
    sequences = batch.sequences
    counts = _integers([sequence.count for sequence in sequences])
    starts = _integers([sequence.start for sequence in sequences])
    sizes = _integers([len(sequence.block_ids) for sequence in sequences])
    blocks = array("i")
    for sequence in sequences:
        blocks.extend(sequence.block_ids)
    query_ends, kv_lengths, table_ends = counts.cumsum(), starts + counts, sizes.cumsum()
    num_tokens = int(counts.sum())
    _check(len(batch.token_ids), num_tokens, kv_lengths, sizes, block_size)
    positions = np.arange(num_tokens) + (kv_lengths - query_ends).repeat(counts)
    places = positions // block_size + (table_ends - sizes).repeat(counts)
    slots = np.frombuffer(blocks, np.int32)[places] * np.int64(block_size) + positions % block_size
    return StepMetadata(
        block_size=block_size,
        sequences=sequences,
        packed=PackedStep(_int32(query_ends), _int32(kv_lengths), _int32(table_ends), blocks, _int32(slots)),
        token_ids=_tensor(_integers(batch.token_ids).reshape(1, -1), device),
        positions=_tensor(positions.reshape(1, -1), device),
        slots=_tensor(slots, device),
        sample_rows=_tensor(_integers([sample.row for sample in batch.samples]), device),
    )


def _check(num_ids: int, num_tokens: int, kv_lengths: _Integers, sizes: _Integers, block_size: int) -> None:
    if num_ids != num_tokens:
        raise ValueError(f"the step has {num_ids} token ids for {num_tokens} rows")
    short = kv_lengths > sizes * block_size
    if short.any():
        first = int(short.argmax())
        raise ValueError(f"{sizes[first]} blocks of {block_size} cannot hold {kv_lengths[first]} tokens")


def _integers(values: Sequence[int]) -> _Integers:
    return np.array(values, np.int64)


def _tensor(values: _Integers, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.to(device)


def _int32(values: _Integers) -> "array[int]":
    return array("i", values.astype(np.int32).tobytes())
