"""Completions and their sampling limits as users of today's vLLM know them, combined and over P/D."""

from typing import Any

import pytest

from tests.conformance.served import PROMPT, Compared, Oracle, Served

pytestmark = pytest.mark.cluster

RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "presence_penalty": ([-2, 2], [-2.01, 2.01]), "frequency_penalty": ([-2, 2], [-2.01, 2.01]),
    "repetition_penalty": ([0.01, 2], [0, -1, "1"]), "temperature": ([0, 2], [-0.01, 2.01]),
    "top_p": ([0.01, 1], [0, 1.01]), "top_k": ([-1, 0, 1, 10**6], [-2, 1.5]), "min_p": ([0, 1], [-0.1, 1.1]),
    "min_tokens": ([0, 8], [9, -1]), "logprobs": ([0, 20], [21, -1, -2]), "prompt_logprobs": ([0, 20], [21, -1]),
    "bad_words": ([[], ["fox"]], [[""], [" "]]), "logit_bias": ([{"319": -100}], [{"320": 1}, {"x": 1}, {"5": "a"}]),
}  # fmt: skip


@pytest.mark.covers(
    "B.limits.1",
    "B.limits.2",
    "B.limits.3",
    "B.limits.4",
    "B.limits.5",
    "B.limits.6",
    "B.limits.7",
    "B.limits.8",
    "B.limits.9",
    "B.limits.10",
)
@pytest.mark.parametrize("name", RANGES)
def test_the_limits_of_each_range_are_accepted(compared: Compared, name: str) -> None:
    good, bad = RANGES[name]

    for value in good:
        compared.agree(f"{name} {value}", compared.text(**{"seed": 1, name: value}))
    for value in bad:
        assert compared.refused(max_tokens=8, **{name: value})["param"].split(".")[0] == name


@pytest.mark.covers("B.limits.3", "B.limits.10")
def test_excessive_values_are_clamped_and_all_bad_keys_are_named(served: Served) -> None:
    sampled = {"seed": 3, "max_tokens": 12}
    assert served.text(temperature=1e-6, **sampled) == served.text(temperature=0.01, **sampled)
    assert served.text(logit_bias={"40": 1e6}) == served.text(logit_bias={"40": 100})
    named = served.refused(logit_bias={"x": 1, "-5": 1, "3": 1})["message"]
    assert ("'x'" in named, "'-5'" in named, "'3'" in named) == (True, True, False)
    unknown = served.refused(logit_bias={"9999": 1})["message"]
    assert ("9999" in unknown, "319" in unknown) == (True, True)


@pytest.mark.covers("B.completion.2")
def test_an_echo_returns_the_prompt_and_max_tokens_0_nothing_else(served: Served, oracle: Oracle) -> None:
    ids = oracle.ids(PROMPT)
    whole = served.completion(echo=True, logprobs=1)["choices"][0]
    alone = served.completion(echo=True, logprobs=1, max_tokens=0)

    assert whole["text"] == PROMPT + served.text()
    assert alone["usage"]["completion_tokens"] == 0
    assert alone["choices"][0]["text"] == PROMPT
    for key, reported in alone["choices"][0]["logprobs"].items():
        assert len(reported) == len(ids)
        if key != "top_logprobs":
            assert (
                reported == pytest.approx(whole["logprobs"][key][: len(ids)], abs=1e-4) if key[0] == "t" else reported
            )


@pytest.mark.covers("A11.11", "A11.12", "B.completion.3")
def test_the_default_limit_is_16_tokens_and_an_echo_may_have_none(served: Served) -> None:
    for fields in ({"max_tokens": None}, {"max_tokens": None, "max_completion_tokens": None}):
        assert served.completion(ignore_eos=True, **fields)["usage"]["completion_tokens"] == 16
    assert served.refused(max_tokens=0)["param"] == "max_tokens"
    assert served.completion(prompt_logprobs=0, max_tokens=0)["usage"]["completion_tokens"] == 0


@pytest.mark.covers("B.completion.5")
def test_a_prompt_is_truncated_on_either_side(served: Served, oracle: Oracle) -> None:
    ids = oracle.ids(PROMPT)
    for side, kept in (("left", ids[-4:]), ("right", ids[:4])):
        cut = served.text(truncate_prompt_tokens=4, truncation_side=side)
        assert cut == served.text(prompt=kept)
    assert served.refused(truncate_prompt_tokens=4, truncation_side="middle")["param"] == "truncation_side"


@pytest.mark.covers("B.completion.6")
def test_a_bad_word_is_never_generated(compared: Compared, oracle: Oracle) -> None:
    written = oracle.ids(oracle.generate(max_new_tokens=24)[0])
    texts = {token_id: oracle.tokenizer.decode([token_id]) for token_id in written}
    bad = next(token_id for token_id, text in texts.items() if text.isalnum())
    fields = {"max_tokens": 24, "return_token_ids": True}
    plain = compared.completion(**fields)["choices"][0]["token_ids"]
    without = compared.completion(bad_words=[texts[bad]], **fields)["choices"][0]["token_ids"]

    assert (bad in plain, bad in without) == (True, False)
    compared.agree("without", without)


@pytest.mark.covers("B.completion.8")
def test_an_id_outside_the_vocabulary_is_named(served: Served) -> None:
    for prompt in ([5, 320], [[5], [5, 320]]):
        refused = served.refused(prompt=prompt)
        assert refused["param"] == "prompt"
        assert "320 is out of vocabulary: ids are 0..319" in refused["message"]
    assert served.refused(prompt=[-1])["param"] == "prompt"
