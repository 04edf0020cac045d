"""Prompts keep their last tokens, as transformers' tokenizers cut them on the left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from scheduler.tokens import Tokens
from scheduler.truncation import truncate_prompt
from wire.errors import InvalidRequest


@given(text=st.text(min_size=1, max_size=30), keep=st.integers(1, 40))
def test_the_last_tokens_are_kept(tokens: Tokens, text: str, keep: int) -> None:
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(tokens.files.folder / "tokenizer.json"), truncation_side="left"
    )
    expected = reference(text, truncation=True, max_length=keep, add_special_tokens=False)["input_ids"]

    assert list(truncate_prompt(tokens._encode(text, False), keep)) == expected


def test_without_a_limit_all_are_kept_and_below_one_is_refused() -> None:
    assert truncate_prompt((1, 2, 3), None) == (1, 2, 3)
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens is 0, must be at least 1"):
        truncate_prompt((1, 2, 3), 0)
