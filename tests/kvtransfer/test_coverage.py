"""Pieces with a bit for each tensor, compared with a plain set of (tensor, token)."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.coverage import Coverage

TENSORS = 4
ranges = st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))
masks = st.integers(1, 2**TENSORS - 1)


def cells(start: int, end: int, mask: int) -> set[tuple[int, int]]:
    return {(tensor, token) for tensor in range(TENSORS) if mask >> tensor & 1 for token in range(start, end)}


@given(st.lists(st.tuples(ranges, masks), max_size=16), ranges, masks)
def test_coverage_agrees_with_a_set_of_cells(
    added: list[tuple[tuple[int, int], int]], requested: tuple[int, int], of: int
) -> None:
    coverage, seen = Coverage(), set[tuple[int, int]]()
    for (start, end), mask in added:
        new = cells(start, end, mask)
        assert coverage.add(start, end, mask) is not bool(new & seen)
        if not new & seen:
            seen |= new

    missing = coverage.missing(*requested, of)
    lacking = {token for tensor, token in cells(*requested, of) - seen}
    assert [token for start, end in missing for token in range(start, end)] == sorted(lacking)
    assert all(start < end for start, end in missing)
    assert all(before[1] < after[0] for before, after in pairwise(missing))


@given(st.permutations([(chunk, tensor) for chunk in range(4) for tensor in range(TENSORS)]))
def test_a_complete_coverage_is_one_piece(order: list[tuple[int, int]]) -> None:
    coverage = Coverage()

    for chunk, tensor in order:
        assert coverage.add(8 * chunk, 8 * chunk + 8, 1 << tensor)

    assert (coverage._starts, coverage._ends, coverage._masks) == ([0], [32], [2**TENSORS - 1])
