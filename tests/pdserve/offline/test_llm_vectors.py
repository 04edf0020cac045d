"""LLM's vectors and scores."""

import itertools
import math

import pytest

from pdserve import LLM


def test_vectors_have_length_1_and_scores_are_their_cosines(local: LLM) -> None:
    texts = ["hello", "the quick brown fox", "hello"]
    made = [one.outputs.embedding for one in local.embed(texts)]
    many = local.score("hello", ["hello"] * 40 + ["the quick brown fox"])
    pairs = local.score(texts, texts[::-1])

    assert [math.fsum(value * value for value in vector) for vector in made] == pytest.approx([1.0] * 3, abs=1e-5)
    assert [one.outputs.data for one in local.encode(texts)] == made
    cosines = [math.fsum(itertools.starmap(float.__mul__, zip(made[0], other, strict=True))) for other in made]
    assert [one.outputs.score for one in many] == pytest.approx([1.0] * 40 + [cosines[1]], abs=1e-5)
    assert [one.outputs.score for one in pairs] == pytest.approx([1.0, 1.0, 1.0], abs=1e-5)
    assert local.embed("hello", dimensions=8)[0].outputs.hidden_size == 8
    with pytest.raises(ValueError, match="2 texts against 3"):
        local.score(texts[:2], texts)
