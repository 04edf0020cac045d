"""Intervals against a plain set of tokens."""

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.coverage import Coverage

ranges = st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(ranges, max_size=12), ranges)
def test_coverage_agrees_with_a_set_of_tokens(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    coverage, tokens = Coverage(), set[int]()
    for start, end in added:
        new = set(range(start, end))
        assert coverage.overlaps(start, end) is bool(new & tokens)
        if not new & tokens:
            coverage.add(start, end)
            tokens |= new

    missing = coverage.missing(*asked)
    assert [t for start, end in missing for t in range(start, end)] == sorted(set(range(*asked)) - tokens)
    assert all(start < end for start, end in missing)
