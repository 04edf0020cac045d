"""Counts that are updated as a sequence grows equal a count of the whole."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.token_counts import TokenCounts


@given(
    prompt=st.lists(st.integers(0, 9), max_size=12),
    outputs=st.lists(st.integers(0, 9), max_size=20),
    cuts=st.lists(st.integers(0, 32), max_size=5),
)
def test_they_are_those_of_the_whole_however_it_grew(prompt: list[int], outputs: list[int], cuts: list[int]) -> None:
    whole, counts = [*prompt, *outputs], TokenCounts()

    for end in [*sorted(min(cut, len(whole)) for cut in cuts), len(whole)]:
        counts.update(whole[:end], len(prompt))

    assert list(counts.ids) == list(dict.fromkeys(whole))
    reported = dict(zip(counts.ids, counts.outputs, strict=True))
    assert {token: count for token, count in reported.items() if count} == Counter(outputs)


@given(
    both=st.lists(st.integers(0, 9), max_size=12), one=st.lists(st.integers(0, 9)), other=st.lists(st.integers(0, 9))
)
def test_a_fork_continues_from_the_same_counts_and_leaves_them_alone(
    both: list[int], one: list[int], other: list[int]
) -> None:
    counts = TokenCounts().update(both, 0)
    fork = counts.fork().update([*both, *other], 0)
    counts.update([*both, *one], 0)

    for reported, whole in ((counts, [*both, *one]), (fork, [*both, *other])):
        assert dict(zip(reported.ids, reported.outputs, strict=True)) == Counter(whole)
