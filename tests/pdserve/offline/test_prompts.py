"""The forms of prompts, conversations and parameters."""

from typing import Any

import pytest

from pdserve.offline.prompts import PromptInput, conversations, one_each, read_prompts

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", [PromptInput("a")]),
        (["a", "b"], [PromptInput("a"), PromptInput("b")]),
        ([1, 2], [PromptInput(None, [1, 2])]),
        ([[1, 2], [3]], [PromptInput(None, [1, 2]), PromptInput(None, [3])]),
        ({"prompt": "a", "cache_salt": "s"}, [PromptInput("a", None, "s")]),
        ([{"prompt_token_ids": [1]}, "a", [2]], [PromptInput(None, [1]), PromptInput("a"), PromptInput(None, [2])]),
        ((word for word in ("a", "b")), [PromptInput("a"), PromptInput("b")]),
        ([], []),
    ],
)  # fmt: skip
def test_each_form_is_read(given: Any, prompts: list[PromptInput]) -> None:
    assert read_prompts(given) == prompts


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (["a", ""], ValueError, "prompt 1 is empty"),
        (["a", []], ValueError, "prompt 1 is empty"),
        (["a", 5.0], TypeError, "prompt 1 is a value of type float: pass a string, a list of token ids"),
        ([[1, "a"]], TypeError, "prompt 0 is a value of type list"),
        ([[True, False]], TypeError, "prompt 0 is a value of type list"),
        ({"prompt_token_ids": []}, ValueError, "prompt_token_ids must be a non-empty list of token ids"),
        ({"text": "a"}, ValueError, "prompt 0 has neither prompt nor prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, TypeError, "prompt 0: multi_modal_data.image 0 is int"),
        (None, TypeError, "prompts is None: pass one prompt or a list"),
        (5, TypeError, "prompt 0 is a value of type int: pass a string"),
        (b"a", TypeError, "prompt 0 is a value of type bytes: pass a string"),
    ],
)  # fmt: skip
def test_an_invalid_prompt_is_named(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_prompts(given)


def test_one_set_of_parameters_is_for_all_and_several_are_one_each() -> None:
    assert one_each(None, 2, "default", "x") == ["default", "default"]
    assert one_each(5, 2, 0, "x") == [5, 5]
    assert one_each([5, 6], 2, 0, "x") == [5, 6]
    numbers = "the number of sets of parameters is 3, but the number of prompts is 2"
    with pytest.raises(ValueError, match=f"{numbers}: pass one for all, or one each"):
        one_each([1, 2, 3], 2, 0, "sets of parameters")


def test_one_conversation_or_several_are_accepted() -> None:
    assert conversations([USER]) == [[USER]]
    assert conversations([[USER], [USER, USER]]) == [[USER], [USER, USER]]
    with pytest.raises(TypeError, match="conversation 1 is str"):
        conversations([[USER], "hi"])
    with pytest.raises(ValueError, match="conversation 1 has no message"):
        conversations([[USER], []])
