"""Which unknown names count as misspelled known ones."""

import pytest

from scheduler.api.near_names import edit_distance, near_name

KNOWN = ("max_tokens", "temperature", "top_k", "top_p", "n", "seed", "stop", "min_tokens", "logprobs")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"), ("temprature", "temperature"), ("tempertaure", "temperature"),
        ("temp", "temperature"), ("max", "max_tokens"), ("sede", "seed"), ("logprob", "logprobs"), ("topk", "top_k"),
        ("id", None), ("x", None), ("top_a", "top_k"), ("unheard_of", None), ("te", None), ("stream", None),
    ],
)  # fmt: skip
def test_two_edits_or_a_common_prefix_are_near(name: str, meant: str | None) -> None:
    assert near_name(name, KNOWN) == meant


@pytest.mark.parametrize(
    ("one", "other", "edits"), [("", "", 0), ("a", "", 1), ("kitten", "sitting", 3), ("ab", "ba", 2), ("abc", "abc", 0)]
)
def test_edits_are_counted_as_levenshtein_does(one: str, other: str, edits: int) -> None:
    assert edit_distance(one, other) == edit_distance(other, one) == edits
