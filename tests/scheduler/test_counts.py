"""A running sum of numbers by prompt, compared with adding them up."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.load.counts import PromptCounts

CHANGES = st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers(0, 99)))


@given(CHANGES)
def test_the_total_is_the_sum_after_any_changes(changes: list[tuple[str, int | None]]) -> None:
    tally, numbers = PromptCounts(), dict[str, int]()
    for prompt_id, number in changes:
        if number is None:
            assert tally.drop(prompt_id) == numbers.pop(prompt_id, 0)
        else:
            tally.set(prompt_id, number)
            numbers[prompt_id] = number

        assert tally.total == sum(numbers.values())
        assert tally.of(prompt_id) == numbers.get(prompt_id, 0)
        assert (prompt_id in tally) == (prompt_id in numbers)
