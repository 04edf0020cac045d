"""A put is cut into few frames, within the limits, and nothing of it is lost."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.framing import FRAME_TOKENS, FrameRange, cut_frames
from kvtransfer.terms import RankHeads
from kvtransfer.transport_interface import FRAME_BYTES
from wire.kv_layout import Heads, KvTensor

MANY = 64 << 20


def part(*heads: int, head_dim: int = 32) -> RankHeads:
    """Tensors of that many heads, all of them sent; 64 bytes a head by default."""
    tensors = [
        KvTensor(number // 2, "kv"[number % 2], count or 1, head_dim, "float16") for number, count in enumerate(heads)
    ]
    return RankHeads(tensors, [Heads(0, count) for count in heads])


def everything(of: RankHeads, tokens: int) -> list[tuple[int, list[tuple[int, int]]]]:
    return [(tensor, [(0, tokens)] if num_bytes else []) for tensor, num_bytes in enumerate(of.token_bytes)]


def test_small_neighbours_share_a_frame() -> None:
    of = part(3, 3, 3, 3)

    assert list(cut_frames(of, everything(of, 16), MANY)) == [FrameRange(0, 4, 0, 16)]


def test_a_shared_frame_stays_in_its_limit_for_any_tensor_size() -> None:
    of = part(3, 3, 3)
    tokens = FRAME_BYTES // of.token_bytes[0] // 2

    assert list(cut_frames(of, everything(of, tokens), MANY)) == [
        FrameRange(0, 2, 0, tokens),
        FrameRange(2, 1, 0, tokens),
    ]
    assert list(cut_frames(of, everything(of, 2 * tokens + 1), MANY)) == [
        FrameRange(tensor, 1, 0, 2 * tokens + 1) for tensor in range(3)
    ]


def test_a_large_tensor_is_cut() -> None:
    of = part(1)

    assert list(cut_frames(of, everything(of, 100), 64 * 40)) == [
        FrameRange(0, 1, 0, 40),
        FrameRange(0, 1, 40, 80),
        FrameRange(0, 1, 80, 100),
    ]


def test_unwanted_heads_or_tensors_end_a_frame() -> None:
    of = part(3, 3, 1, 0, 1, 1)

    assert list(cut_frames(of, everything(of, 8), MANY)) == [
        FrameRange(0, 2, 0, 8),
        FrameRange(2, 1, 0, 8),
        FrameRange(4, 2, 0, 8),
    ]
    assert list(cut_frames(of, [(0, [(0, 8)]), (1, [(4, 8)]), (5, [(4, 8)])], MANY)) == [
        FrameRange(0, 1, 0, 8), FrameRange(1, 1, 4, 8), FrameRange(5, 1, 4, 8),
    ]  # fmt: skip


ranges = st.lists(st.integers(0, 3 * FRAME_TOKENS), max_size=6, unique=True).map(
    lambda ends: [(start, end) for start, end in list(pairwise(sorted(ends)))[::2]]
)


@given(
    heads=st.lists(st.integers(1, 3), min_size=1, max_size=8),
    choices=st.lists(ranges, min_size=1, max_size=3),
    picks=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    max_bytes=st.sampled_from([1, 1 << 12, FRAME_BYTES, MANY]),
)
def test_every_token_goes_out_once_within_the_limits(
    heads: list[int], choices: list[list[tuple[int, int]]], picks: list[int], max_bytes: int
) -> None:
    of = part(*heads)
    max_bytes = max(max_bytes, 64 * 64)  # else a range of 98,304 tokens is as many frames
    wanted = [(tensor, choices[picks[tensor] % len(choices)]) for tensor in range(len(heads))]

    cuts = list(cut_frames(of, wanted, max_bytes))

    for tensor, of_it in wanted:
        mine = sorted((cut.start, cut.end) for cut in cuts if cut.tensor <= tensor < cut.tensor + cut.num_tensors)
        assert _merged(mine) == _merged(of_it)
        assert all(before[1] <= after[0] for before, after in pairwise(mine))
    for cut in cuts:
        tensors = range(cut.tensor, cut.tensor + cut.num_tensors)
        num_bytes = (cut.end - cut.start) * sum(of.token_bytes[tensor] for tensor in tensors)
        assert 0 < cut.end - cut.start <= FRAME_TOKENS
        assert num_bytes <= (max_bytes if cut.num_tensors == 1 else min(max_bytes, FRAME_BYTES))
        assert len({of.heads[tensor] for tensor in tensors}) == 1


def _merged(those: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in those:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined
