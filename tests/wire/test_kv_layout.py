"""Runs cover exactly the bytes of the requested tokens, whatever the blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.kv_layout import ByteRun, Heads, KvTensor, PoolLayout, Rank, describe_difference, head_range, ranks_holding

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


@given(st.integers(1, 40), st.integers(1, 16))
def test_ranks_hold_whole_heads_divided_as_evenly_as_possible(heads: int, ranks: int) -> None:
    ranges = [head_range(heads, Rank(number, ranks)) for number in range(ranks)]

    counts = [end - start for start, end in ranges]
    assert {head for one in ranges for head in range(*one)} == set(range(heads))
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == max(heads, ranks)
    for head in range(heads):
        holders = [number for number, one in enumerate(ranges) if head in range(*one)]
        assert [*ranks_holding(head, heads, ranks)] == holders
        assert len(holders) in (ranks // heads, -(-ranks // heads)) or heads > ranks


def test_two_ranks_share_three_heads_as_two_and_one() -> None:
    assert [head_range(3, Rank(number, 2)) for number in range(2)] == [Heads(0, 2), Heads(2, 3)]
    assert [head_range(1, Rank(number, 4)) for number in range(4)] == [Heads(0, 1)] * 4


def test_the_pool_of_a_rank_has_slots_for_its_heads_only() -> None:
    model = (KvTensor(0, "k", 3, 4, "float32"), KvTensor(2, "latent", 1, 6, "bfloat16"))

    pools = [PoolLayout(model, num_blocks=8, block_size=4, rank=Rank(number, 2)) for number in range(2)]

    assert [[tensor.heads for tensor in pool.tensors] for pool in pools] == [[2, 1], [1, 1]]
    assert [pool.token_bytes for pool in pools] == [2 * 16 + 12, 16 + 12]
    assert pools[0].model_tensors == pools[1].model_tensors == model
    assert [*pools[1].runs(0, (2, 3), 1, 5)] == [ByteRun(9 * 16, 4 * 16)]
    assert pools[0].layers == (0, 2)


@pytest.mark.parametrize("rank", [Rank(2, 2), Rank(-1, 2), Rank(0, 0), Rank(0, 257)])
def test_an_invalid_rank_is_refused(rank: Rank) -> None:
    with pytest.raises(ValueError, match=f"rank {rank.number} of {rank.of}"):
        PoolLayout(TENSORS, num_blocks=8, block_size=4, rank=rank)


def test_a_difference_names_the_layers_with_other_tensors() -> None:
    latent = (KvTensor(1, "latent", 1, 8, "float32"),)

    words = describe_difference(TENSORS, (*TENSORS[:2], *latent))
    fewer = describe_difference(TENSORS, TENSORS[:2])
    moved = describe_difference(TENSORS, (TENSORS[2], *TENSORS[:2]))

    assert words == "KV of layer 1: k 2x4 float32 here, latent 1x8 float32 there"
    assert fewer == "KV tensors: 3 here, 2 there; KV of layer 1: k 2x4 float32 here, none there"
    assert moved == "order of KV tensors: layers 0 0 1 here, 1 0 0 there"


def test_a_difference_names_both_values() -> None:
    other = (KvTensor(0, "k", 3, 4, "float32"), *TENSORS[1:])

    words = describe_difference(TENSORS, other)

    assert words is not None
    assert "2x4" in words
    assert "3x4" in words
    assert describe_difference(TENSORS, TENSORS) is None
