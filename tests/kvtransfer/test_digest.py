"""Pieces, pairs and the one pass that copies and digests."""

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.digest import copy_and_digest, digest_of
from kvtransfer.slots import SlotMap, pair, window
from wire.kv_layout import KvTensor, PoolLayout


@given(st.lists(st.integers(1, 7), min_size=1, max_size=8), st.lists(st.integers(1, 7), min_size=1, max_size=8))
def test_pieces_cut_differently_are_copied_in_order_and_digested(left: list[int], right: list[int]) -> None:
    total = max(sum(left), sum(right))
    data, target = bytes(range(1, total + 1)), bytearray(total)
    sources, targets = _cut(memoryview(data), left), _cut(memoryview(target), right)

    digest = copy_and_digest(pair(sources, targets), stopped=lambda: False, piece_bytes=3)

    assert bytes(target) == data
    assert digest == digest_of([data]) == xxhash.xxh3_64_intdigest(data)


def test_a_copy_stops_when_told_and_has_no_digest() -> None:
    target = bytearray(10)
    answers = iter([False, False, True])

    digest = copy_and_digest(
        [(memoryview(b"0123456789"), memoryview(target))], stopped=lambda: next(answers), piece_bytes=2
    )

    assert digest is None
    assert bytes(target) == b"0123" + bytes(6)


def test_slots_of_every_tensor_are_the_runs_of_the_layout() -> None:
    tensors = (KvTensor(0, "k", 2, 8, "float32"), KvTensor(0, "v", 1, 8, "bfloat16"))
    layout = PoolLayout(tensors, num_blocks=16, block_size=4)
    memory, blocks = memoryview(bytearray(layout.total_bytes)), (3, 4, 9, 2)

    for tensor in range(2):
        where = window(blocks, 4, 5, 15)
        pieces = SlotMap(layout).pieces(memory, tensor, where)
        expected = [(run.offset, run.length) for run in layout.runs(tensor, blocks, 5, 15)]
        assert where.block_ids == (4, 9, 2)
        assert [len(piece) for piece in pieces] == [length for _, length in expected]
        for piece, (offset, length) in zip(pieces, expected, strict=True):
            piece[:] = bytes([7]) * length
            assert bytes(memory[offset : offset + length]) == bytes([7]) * length


def _cut(view: memoryview, lengths: list[int]) -> list[memoryview]:
    pieces = []
    for length in lengths:
        pieces.append(view[:length])
        view = view[length:]
    return [piece for piece in [*pieces, view] if len(piece)]
