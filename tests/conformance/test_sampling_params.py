"""A3: the extra sampling parameters, each by its effect, combined and over P/D."""

from typing import Any

import pytest

from tests.conformance.served import CHAT, PROMPT, Compared, Oracle, Served, events

pytestmark = pytest.mark.cluster

SEEDED = {"temperature": 1.0, "seed": 11}


@pytest.mark.covers("B.completion.4", "A3.43")
def test_best_of_returns_the_likeliest(compared: Compared) -> None:
    fields = {**SEEDED, "best_of": 4, "max_tokens": 6, "ignore_eos": True}
    every = compared.completion(n=4, logprobs=0, **{**fields, "best_of": None})["choices"]
    best = compared.completion(n=2, **fields)["choices"]

    sums = {choice["text"]: sum(choice["logprobs"]["token_logprobs"]) for choice in every}
    likeliest = sorted(sums, key=lambda text: -sums[text])[:2]
    assert [choice["text"] for choice in best] == likeliest
    compared.agree("texts", likeliest)
    assert compared.refused(best_of=1, n=2)["param"] == "best_of"
    assert compared.refused(best_of=2, temperature=0)["param"] == "best_of"
    assert len(compared.chat(n=1, best_of=3, temperature=1.0)["choices"]) == 1


@pytest.mark.covers("A3.44")
def test_beam_search_is_transformers_own(served: Served, oracle: Oracle) -> None:
    fields: dict[str, Any] = {"temperature": None, "return_token_ids": True, "logprobs": 2}
    choices = served.completion(use_beam_search=True, n=3, **fields)["choices"]

    assert [choice["text"] for choice in choices] == oracle.generate(num_beams=3, num_return_sequences=3)
    prompt = oracle.ids(PROMPT)
    for choice in choices:
        written = choice["token_ids"]
        likely = oracle.logprobs([*prompt, *written])[len(prompt) - 1 : -1]
        own = [row[token_id].item() for row, token_id in zip(likely, written, strict=True)]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(own, abs=1e-3)
    assert len(served.chat(use_beam_search=True, best_of=2)["choices"]) == 1
    beams = {"use_beam_search": True, "n": 2, "temperature": 0}
    assert served.refused(**beams | {"n": 1})["param"] == "n"
    assert served.refused(**beams | {"temperature": 1})["param"] == "temperature"
    assert served.refused(**beams | {"top_p": 0.5})["param"] == "top_p"
    assert served.refused(**beams | {"top_k": 5})["param"] == "top_k"
    assert served.refused(**beams | {"stream": True})["param"] == "stream"


@pytest.mark.covers("A3.45")
def test_top_k_1_is_greedy_and_its_range_is_checked(served: Served) -> None:
    assert served.text(top_k=1, temperature=2.0, seed=3) == served.text()
    assert served.chat_text(top_k=1, temperature=2.0, seed=3) == served.chat_text()
    assert served.text(top_k=0, **SEEDED) == served.text(**SEEDED)
    for bad in (-2, 1.5, "3"):
        assert served.refused(top_k=bad)["param"] == "top_k"


@pytest.mark.covers("A3.46")
def test_min_p_1_is_greedy_and_its_range_is_checked(served: Served) -> None:
    assert served.text(min_p=1, temperature=2.0, seed=3) == served.text()
    assert served.refused(min_p=1.1)["param"] == "min_p"
    assert served.refused(min_p=-0.1)["param"] == "min_p"


@pytest.mark.covers("A3.47")
def test_repetition_penalty_is_transformers_own(served: Served, oracle: Oracle) -> None:
    penalised = served.text(repetition_penalty=8.0, max_tokens=24, ignore_eos=True)

    assert penalised == oracle.generate(repetition_penalty=8.0, max_new_tokens=24, eos_token_id=-1)[0]
    assert penalised != served.text(max_tokens=24, ignore_eos=True)
    assert served.refused(repetition_penalty=0)["param"] == "repetition_penalty"


@pytest.mark.covers("A3.48")
def test_length_penalty_ranks_beams(served: Served, oracle: Oracle) -> None:
    beams = {"use_beam_search": True, "n": 4, "stop_token_ids": None}
    for penalty in (-2.0, 3.0):
        texts = [choice["text"] for choice in served.completion(length_penalty=penalty, **beams)["choices"]]
        assert texts == oracle.generate(num_beams=4, num_return_sequences=4, length_penalty=penalty)
    assert served.refused(length_penalty=0.5)["param"] == "length_penalty"


@pytest.mark.covers("A3.49")
@pytest.mark.parametrize("early", [True, False, "never"])
def test_early_stopping_goes_with_beams(served: Served, oracle: Oracle, early: Any) -> None:
    texts = [choice["text"] for choice in served.completion(use_beam_search=True, n=2, early_stopping=early)["choices"]]

    assert texts == oracle.generate(num_beams=2, num_return_sequences=2, early_stopping=early)
    assert served.refused(early_stopping=True)["param"] == "early_stopping"


@pytest.mark.covers("B.finish.2", "A3.50")
def test_stop_token_ids_stop_and_are_reported(served: Served, oracle: Oracle) -> None:
    ids = served.completion(return_token_ids=True)["choices"][0]["token_ids"]
    stop = ids[2]
    choice = served.completion(stop_token_ids=[stop])["choices"][0]

    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == oracle.tokenizer.decode(ids[: ids.index(stop)])


@pytest.mark.covers("A3.51")
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_in_the_output_only_when_requested(served: Served, oracle: Oracle, stream: bool) -> None:
    letters = [oracle.ids(letter)[0] for letter in "abcdefgh"]
    fields = {"allowed_token_ids": letters, "max_tokens": 12}
    whole = served.text(**fields)
    stop = whole[3:6]
    cut = whole.index(stop)
    text = served.streamed if stream else served.text

    assert text(stop=stop, **fields) == whole[:cut]
    assert text(stop=[stop, "zz"], include_stop_str_in_output=True, **fields) == whole[: cut + len(stop)]


def test_listed_tokens_and_repetitions_are_the_same_over_p_and_d(compared: Compared) -> None:
    listed = {"logprobs": 0, "logprob_token_ids": [40, 41], "return_tokens_as_token_ids": True}
    reported = compared.completion(**listed)["choices"][0]["logprobs"]
    assert all({"token_id:40", "token_id:41"} <= set(one) for one in reported["top_logprobs"])
    compared.agree("listed", [[*one] for one in reported["top_logprobs"]])

    rule = {"max_pattern_size": 4, "min_count": 3}
    fields = {"allowed_token_ids": [40], "max_tokens": 20, "return_token_ids": True}
    choice = compared.completion(repetition_detection=rule, **fields)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    assert choice["token_ids"] == [40] * 3
    for streamed in (True, False):
        body = {"prompt": PROMPT, "temperature": 0, "repetition_detection": rule, "stream": streamed} | fields
        answer = compared.post("/v1/completions", **body)
        last = events(answer)[-1] if streamed else answer.json()
        assert last["choices"][0]["stop_reason"] == "repetition_detected"


@pytest.mark.covers("B.finish.1", "B.finish.2", "A3.52", "A9.133")
def test_ignore_eos_reaches_max_tokens(served: Served) -> None:
    likes_eos = {"logit_bias": {"2": 100}}
    ended = served.completion(**likes_eos)
    ignored = served.completion(ignore_eos=True, max_tokens=9, **likes_eos)

    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["choices"][0]["stop_reason"] is None
    assert ignored["choices"][0]["finish_reason"] == "length"
    assert ignored["usage"]["completion_tokens"] == 9


@pytest.mark.covers("A3.53")
def test_min_tokens_prevents_every_earlier_finish(served: Served) -> None:
    answer = served.completion(min_tokens=5, logit_bias={"2": 100})

    assert answer["usage"]["completion_tokens"] == 6
    assert served.refused(min_tokens=9, max_tokens=8)["param"] == "min_tokens"


@pytest.mark.covers("A3.54")
def test_special_tokens_are_shown_only_when_requested(served: Served) -> None:
    forced = {"allowed_token_ids": [1], "max_tokens": 2}

    assert served.text(**forced) == ""
    assert served.text(skip_special_tokens=False, **forced) == "<|im_start|><|im_start|>"
    assert served.chat_text(skip_special_tokens=False, **forced) == "<|im_start|><|im_start|>"


@pytest.mark.covers("A3.55")
def test_spaces_between_special_tokens_is_accepted(served: Served) -> None:
    """This tokenizer puts no space there; tests/scheduler/test_detokenizer.py has one that does."""
    shown = {"allowed_token_ids": [1], "max_tokens": 2, "skip_special_tokens": False}

    assert served.text(spaces_between_special_tokens=False, **shown) == "<|im_start|><|im_start|>"


@pytest.mark.covers("A3.56")
def test_truncate_prompt_tokens_keeps_the_last(served: Served, oracle: Oracle) -> None:
    ids = oracle.ids(PROMPT)
    cut = served.completion(truncate_prompt_tokens=3)

    assert cut["usage"]["prompt_tokens"] == 3
    assert cut["choices"][0]["text"] == served.text(prompt=ids[-3:])
    assert served.chat(truncate_prompt_tokens=3)["usage"]["prompt_tokens"] == 3
    assert served.refused(truncate_prompt_tokens=0)["param"] == "truncate_prompt_tokens"


@pytest.mark.covers("A3.57")
def test_prompt_logprobs_are_the_log_softmax(served: Served, oracle: Oracle) -> None:
    reported = served.completion(prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    ids = oracle.ids(PROMPT)
    expected = oracle.logprobs(ids)

    assert len(reported) == len(ids)
    assert reported[0] is None
    for at in range(1, len(ids)):
        row = expected[at - 1]
        assert reported[at][str(ids[at])]["logprob"] == pytest.approx(row[ids[at]].item(), abs=1e-4)
        likeliest = row.topk(2).indices.tolist()
        assert [reported[at][str(token_id)]["rank"] for token_id in likeliest] == [1, 2]
    assert len(served.chat(prompt_logprobs=0)["prompt_logprobs"]) == served.chat()["usage"]["prompt_tokens"]
    assert served.refused(prompt_logprobs=1, stream=True)["param"] == "prompt_logprobs"
    assert served.refused(prompt_logprobs=-1)["param"] == "prompt_logprobs"


@pytest.mark.covers("A3.58")
def test_only_allowed_token_ids_appear(compared: Compared) -> None:
    allowed = [40, 41, 42]
    choice = compared.completion(allowed_token_ids=allowed, temperature=2.0, seed=5, return_token_ids=True)["choices"][
        0
    ]

    assert len(choice["token_ids"]) == 8
    assert set(choice["token_ids"]) <= set(allowed)
    compared.agree("ids", choice["token_ids"])
    assert "320 is out of vocabulary: ids are 0..319" in compared.refused(allowed_token_ids=[320])["message"]


@pytest.mark.covers("A2.35")
def test_penalties_bias_seed_and_user_each_have_their_effect(compared: Compared) -> None:
    plain = compared.chat_text()
    forced = compared.chat_text(logit_bias={"40": 100}, return_token_ids=True)
    assert forced == compared.text(allowed_token_ids=[40])
    assert compared.chat_text(user="someone") == plain
    first, again, other = (compared.chat_text(temperature=1.0, seed=seed, max_tokens=16) for seed in (1, 1, 2))
    assert (first == again, first == other) == (True, False)
    compared.agree("seeded", first)
    few = compared.chat(logit_bias={"40": 3}, frequency_penalty=2.0, presence_penalty=2.0, max_tokens=24)
    many = compared.chat(logit_bias={"40": 3}, max_tokens=24)
    letter = compared.text(allowed_token_ids=[40], max_tokens=1)
    count = [answer["choices"][0]["message"]["content"].count(letter) for answer in (few, many)]
    compared.agree("penalised", few["choices"])
    assert count[0] <= count[1]
    assert CHAT[0]["role"] == "user"


@pytest.mark.covers("A9.130", "A9.131")
def test_penalties_have_their_range(compared: Compared) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        for bad in (2.1, -2.1, "1", True):
            assert compared.refused(**{name: bad})["param"] == name
        for good in (-2, 0, 2):
            compared.agree(f"{name} {good}", compared.text(**{name: good}, max_tokens=12))
