"""Runs cover exactly the bytes of the tokens asked for, whatever the blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.kv_layout import ByteRun, KvTensor, PoolLayout, describe_difference

TENSORS = (KvTensor(0, "k", 2, 4, "float32"), KvTensor(0, "v", 2, 4, "bfloat16"), KvTensor(1, "k", 2, 4, "float32"))


def layout(num_blocks: int = 8, block_size: int = 4) -> PoolLayout:
    return PoolLayout(TENSORS, num_blocks=num_blocks, block_size=block_size)


@given(st.permutations(range(8)), st.integers(0, 32), st.integers(0, 32))
def test_runs_cover_each_token_once_in_order(blocks: list[int], a: int, b: int) -> None:
    start, end = min(a, b), max(a, b)
    pool = layout()
    size = TENSORS[1].token_bytes

    covered = [
        offset
        for run in pool.runs(1, blocks, start, end)
        for offset in range(run.offset, run.offset + run.length, size)
    ]

    assert covered == [pool.offsets[1] + (blocks[t // 4] * 4 + t % 4) * size for t in range(start, end)]


def test_neighbouring_blocks_are_one_run() -> None:
    pool = layout()

    assert list(pool.runs(0, (2, 3, 4), 0, 12)) == [ByteRun(2 * 4 * 32, 3 * 4 * 32)]


def test_a_block_outside_the_pool_is_refused() -> None:
    with pytest.raises(IndexError, match="block 9"):
        list(layout().runs(0, (9,), 0, 1))


def test_tensors_start_aligned_and_do_not_overlap() -> None:
    pool = layout(num_blocks=1000)

    ends = [o + 1000 * 4 * t.token_bytes for o, t in zip(pool.offsets, pool.tensors, strict=True)]
    assert all(offset % 4096 == 0 for offset in pool.offsets)
    assert all(end <= start for end, start in zip(ends, pool.offsets[1:], strict=False))
    assert ends[-1] <= pool.total_bytes


def test_a_difference_names_both_values() -> None:
    other = (KvTensor(0, "k", 3, 4, "float32"), *TENSORS[1:])

    words = describe_difference(TENSORS, other)

    assert words is not None
    assert "2x4" in words
    assert "3x4" in words
    assert describe_difference(TENSORS, TENSORS) is None
