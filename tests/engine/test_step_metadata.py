"""Positions, slots and runs of a step, against slot arithmetic written out token by token."""

import pytest
import torch

from engine.step import BatchSequence, SampleRow, StepBatch
from engine.step_metadata import build
from wire.types import SamplingParams

_CPU = torch.device("cpu")


def test_tokens_get_their_positions_and_slots() -> None:
    sequences = (BatchSequence(14, 4, (9, 2)), BatchSequence(32, 1, (4, 5, 1)))
    samples = (SampleRow(3, SamplingParams(max_tokens=1), 0, 0), SampleRow(4, SamplingParams(max_tokens=1), 0, 0))

    metadata = build(StepBatch((1, 2, 3, 4, 5), sequences, samples), block_size=16, device=_CPU)

    assert metadata.token_ids.tolist() == [[1, 2, 3, 4, 5]]
    assert metadata.positions.tolist() == [[14, 15, 16, 17, 32]]
    assert metadata.slots.tolist() == [9 * 16 + 14, 9 * 16 + 15, 2 * 16, 2 * 16 + 1, 16]
    assert metadata.sample_rows.tolist() == [3, 4]
    assert [*metadata.rows()] == [(slice(0, 4), sequences[0]), (slice(4, 5), sequences[1])]


def test_native_kernels_get_the_same_in_arrays() -> None:
    sequences = (BatchSequence(14, 4, (9, 2)), BatchSequence(32, 1, (4, 5, 1)), BatchSequence(0, 3, (6,)))

    packed = build(StepBatch((1, 2, 3, 4, 5, 6, 7, 8), sequences, ()), block_size=16, device=_CPU).packed

    assert packed.query_ends.tolist() == [4, 5, 8]
    assert packed.kv_lengths.tolist() == [18, 33, 3]
    assert packed.table_ends.tolist() == [2, 5, 6]
    assert packed.blocks.tolist() == [9, 2, 4, 5, 1, 6]
    assert packed.slots.tolist() == [9 * 16 + 14, 9 * 16 + 15, 2 * 16, 2 * 16 + 1, 16, 96, 97, 98]
    assert packed.slots.itemsize == 8


def test_a_step_without_sequences_is_empty() -> None:
    metadata = build(StepBatch((), (), ()), block_size=16, device=_CPU)

    assert metadata.token_ids.shape == (1, 0)
    assert metadata.packed.query_ends.tolist() == []


def test_a_short_block_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 blocks of 16 cannot hold 33 tokens"):
        build(StepBatch((0,), (BatchSequence(32, 1, (1, 2)),), ()), block_size=16, device=_CPU)


def test_token_ids_must_fill_the_rows() -> None:
    with pytest.raises(ValueError, match="2 token ids for 1 rows"):
        build(StepBatch((0, 0), (BatchSequence(0, 1, (1,)),), ()), block_size=16, device=_CPU)
