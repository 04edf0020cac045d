"""Token ids in parameters have to be tokens of the model."""

from typing import Any

import pytest

from engine.sampling.logits_check import check_token_params
from wire.errors import InvalidRequest
from wire.types import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [("logit_bias", ((3, 1.0), (100, 1.0))), ("allowed_token_ids", (0, 100)), ("bad_words", ((1,), (2, 100)))],
)
def test_an_id_outside_the_vocabulary_is_refused_by_name(name: str, value: Any) -> None:
    params = SamplingParams(max_tokens=1, **{name: value})

    check_token_params(params, 101)
    with pytest.raises(InvalidRequest, match=rf"{name} has token id 100, .* \[0, 100\)") as refused:
        check_token_params(params, 100)

    assert refused.value.param == name


def test_stop_ids_may_exceed_the_vocabulary() -> None:
    check_token_params(SamplingParams(max_tokens=1, stop_token_ids=(5000,)), 100)


def test_a_negative_stop_id_is_refused_with_its_value() -> None:
    with pytest.raises(InvalidRequest, match=r"stop_token_ids has token id -1, but ids must be 0 or more") as refused:
        check_token_params(SamplingParams(max_tokens=1, stop_token_ids=(3, -1)), 100)

    assert refused.value.param == "stop_token_ids"


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids"])
def test_a_list_longer_than_the_vocabulary_is_refused_with_its_length(name: str) -> None:
    entry = (3, 1.0) if name == "logit_bias" else 3
    fitting: dict[str, Any] = {name: (entry,) * 100}
    long: dict[str, Any] = {name: (entry,) * 101}

    check_token_params(SamplingParams(max_tokens=1, **fitting), 100)
    with pytest.raises(InvalidRequest, match=rf"{name} has 101 entries, but the vocabulary has 100 tokens") as refused:
        check_token_params(SamplingParams(max_tokens=1, **long), 100)

    assert refused.value.param == name
