"""Prompts keep their last tokens, as transformers' tokenizers truncate on the left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from scheduler.tokenizer.truncation import truncate_prompt
from scheduler.tokens import Tokens
from wire.errors import InvalidRequest


@given(text=st.text(min_size=1, max_size=30), keep=st.integers(1, 40))
def test_the_last_tokens_are_kept(tokens: Tokens, text: str, keep: int) -> None:
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(tokens.files.folder / "tokenizer.json"), truncation_side="left"
    )
    expected = reference(text, truncation=True, max_length=keep, add_special_tokens=False)["input_ids"]

    assert list(truncate_prompt(tokens._encode(text, False), keep, room=40)) == expected


def test_without_truncation_all_tokens_stay_minus_one_is_what_fits() -> None:
    assert truncate_prompt((1, 2, 3), None, room=2) == (1, 2, 3)
    assert truncate_prompt((1, 2, 3), -1, room=2) == (2, 3)
    assert truncate_prompt((1, 2, 3), -1, room=5) == (1, 2, 3)


@pytest.mark.parametrize("keep", [0, -2, 9])
def test_other_numbers_are_refused_with_the_limit(keep: int) -> None:
    words = f"truncate_prompt_tokens is {keep}, but must be from 1 to 8, or -1 for as many as fit"

    with pytest.raises(InvalidRequest, match=words):
        truncate_prompt((1, 2, 3), keep, room=8)
