"""A few rows are scored on the keys in place, many rows on a packed copy: the results are equal bit for bit."""

import pytest
import torch

from engine.attention.interface import AttentionOptions
from engine.attention.native import NativeAttention
from tests.engine.attention_case import Sequence, Shape, case_of, random_sequence

_OPTIONS = AttentionOptions(0.2, softcap=20.0)
_LENGTH = 209  # a full tile, one of few keys, and one that is filled by half of the vectors


@pytest.mark.combinations(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", range(1, 8))
def test_a_token_alone_has_the_same_bits_as_in_a_chunk(
    backend: NativeAttention, group: int, dtype: torch.dtype
) -> None:
    shape = Shape(2 * group, 2, 40, 48, block_size=7, dtype=dtype, pool_dtype=dtype)
    sequence = random_sequence(0, _LENGTH, shape, seed=group)

    chunk = case_of([sequence], shape).run(backend, _OPTIONS)

    for position in (0, 16, 63, 80, 128, 208):
        end = position + 1
        newest = Sequence(position, sequence.query[:, :end], sequence.keys[:, :end], sequence.values[:, :end])
        case = case_of([newest], shape)
        alone = case.run(backend, _OPTIONS)
        assert torch.equal(alone[0], chunk[position])
        rounding = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(alone.float(), case.expected(_OPTIONS), rtol=rounding, atol=rounding)
