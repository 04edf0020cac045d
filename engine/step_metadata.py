"""What one step's tensors and attention need, built once on the host from a StepBatch."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from engine.step import BatchSequence, StepBatch

_Integers = npt.NDArray[np.int64]


@dataclass(slots=True)
class PackedStep:
    """The step for native kernels: arrays on the host.

    Sequence i has rows query_ends[i - 1] to query_ends[i] and blocks[table_ends[i - 1]] to blocks[table_ends[i]].
    """

    query_ends: "array[int]"  # [num_sequences] int32, as are the next two
    kv_lengths: "array[int]"
    table_ends: "array[int]"
    blocks: "array[int]"  # int32
    slots: "array[int]"  # [num_tokens] int32
    long_slots: _Integers  # the same in int64
    token_ids: "array[int]"  # [num_tokens] int64
    positions: _Integers  # [num_tokens]
    sample_rows: "array[int]"  # [num_samples] int64


class StepMetadata:
    """One step's inputs. A slot is one token's place in the pool: block * block_size + offset.

    The tensors are made when they are asked for: native kernels read the arrays of `packed`, and a step of many
    sequences is held up by each call of torch.
    """

    def __init__(
        self, block_size: int, sequences: Sequence[BatchSequence], packed: PackedStep, device: torch.device
    ) -> None:
        self.block_size, self.sequences, self.packed, self._device = block_size, sequences, packed, device

    @cached_property
    def token_ids(self) -> torch.Tensor:
        """Of each row: [1, num_tokens] int64."""
        return self._tensor(np.frombuffer(self.packed.token_ids, np.int64))[None]

    @cached_property
    def positions(self) -> torch.Tensor:
        """Of each row in its sequence: [1, num_tokens] int64."""
        return self._tensor(self.packed.positions)[None]

    @cached_property
    def slots(self) -> torch.Tensor:
        """Of each row: [num_tokens] int64."""
        return self._tensor(self.packed.long_slots)

    @cached_property
    def sample_rows(self) -> torch.Tensor:
        """Rows whose logits are wanted: [num_samples] int64."""
        return self._tensor(np.frombuffer(self.packed.sample_rows, np.int64))

    def rows(self) -> Iterator[tuple[slice, BatchSequence]]:
        """Yield each sequence behind its rows of the flattened step."""
        for end, sequence in zip(self.packed.query_ends, self.sequences, strict=True):
            yield slice(end - sequence.count, end), sequence

    def _tensor(self, values: _Integers) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


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
    sample_rows = array("q", [sample.row for sample in batch.samples])
    packed = PackedStep(
        _int32(query_ends), _int32(kv_lengths), _int32(table_ends), blocks, _int32(slots), slots,
        array("q", batch.token_ids), positions, sample_rows,
    )  # fmt: skip
    return StepMetadata(block_size, sequences, packed, device)


def _check(num_ids: int, num_tokens: int, kv_lengths: _Integers, sizes: _Integers, block_size: int) -> None:
    if num_ids != num_tokens:
        raise ValueError(f"the step has {num_ids} token ids for {num_tokens} rows")
    short = kv_lengths > sizes * block_size
    if short.any():
        first = int(short.argmax())
        raise ValueError(f"{sizes[first]} blocks of {block_size} cannot hold {kv_lengths[first]} tokens")


def _integers(values: Sequence[int]) -> _Integers:
    return np.array(values, np.int64)


def _int32(values: _Integers) -> "array[int]":
    return array("i", values.astype(np.int32).tobytes())
