"""A9 and the interpretations of A11: the guide's table of request fields, row by row, combined and over P/D."""

import json
from typing import Any

import pytest

from tests.conformance.served import CHAT, PROMPT, Compared, Oracle, Served, events

pytestmark = pytest.mark.cluster


@pytest.mark.covers("A11.3", "A11.10", "A9.120")
def test_the_model_is_the_one_that_is_served(served: Served, model: Any) -> None:
    for path, body in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": CHAT})):
        absent = served.http.post(path, json=body | {"max_tokens": 1})
        unknown = served.post(path, **body | {"model": "gpt-9"})
        typed = served.post(path, **body | {"model": str(model), "max_tokens": 1})

        assert (absent.status_code, absent.json()["model"]) == (200, "tiny")
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
        assert unknown.json()["error"]["type"] == "not_found_error"
        assert typed.status_code == 200


@pytest.mark.covers("B.completion.7", "A9.121")
def test_the_prompt_is_required(served: Served) -> None:
    empty: list[Any] = ["", [], [[]], None, ["a", ""]]
    for prompt in empty:
        assert served.refused(prompt=prompt)["param"] == "prompt"
    missing = served.post("/v1/completions")
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.covers("A11.11", "A11.12", "A9.122")
def test_max_tokens_is_16_by_default(served: Served) -> None:
    defaults = served.post("/v1/completions", prompt=PROMPT, ignore_eos=True, temperature=0).json()
    assert defaults["usage"]["completion_tokens"] == 16
    for bad in (0, -1, 2**40, "5"):
        assert served.refused(max_tokens=bad)["param"] == "max_tokens"
    chat = served.post("/v1/chat/completions", messages=CHAT, ignore_eos=True, temperature=0).json()
    assert chat["usage"]["total_tokens"] == 512


@pytest.mark.covers("A9.123", "A9.124", "A9.125")
def test_sampling_defaults_and_ranges(compared: Compared) -> None:
    fields = {"seed": 9, "max_tokens": 12}
    written_out = compared.post("/v1/completions", prompt=PROMPT, temperature=1.0, top_p=1.0, top_k=-1, **fields).json()
    left_out = compared.post("/v1/completions", prompt=PROMPT, **fields).json()

    assert written_out["choices"] == left_out["choices"]
    compared.agree("sampled", left_out["choices"])
    for name, bad in (("top_p", 0), ("top_p", 1.5), ("temperature", -1), ("temperature", 2.5), ("top_k", -2)):
        assert compared.refused(**{name: bad})["param"] == name


@pytest.mark.covers("B.finish.2", "A9.126")
def test_stop_cuts_at_texts_of_several_bytes(served: Served) -> None:
    """Each of these characters is three tokens here, so the stop is found across token boundaries."""
    fields: dict[str, Any] = {"guided_regex": "我说你好吗再见", "max_tokens": 60}
    assert served.text(**fields) == "我说你好吗再见"
    for stop, text in ((["你", "好"], "我说"), ("好", "我说你"), ("你好吗", "我说"), (None, "我说你好吗再见")):
        choice = served.completion(stop=stop, **fields)["choices"][0]
        assert choice["text"] == served.streamed(stop=stop, **fields) == text
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == (stop[0] if isinstance(stop, list) else stop)


@pytest.mark.covers("A9.127")
def test_a_stream_equals_the_plain_answer(served: Served) -> None:
    for path, body in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": CHAT})):
        fields = body | {"max_tokens": 12, "seed": 4, "n": 2}
        plain = served.post(path, **fields).json()
        assert plain["choices"] == served.post(path, stream=False, **fields).json()["choices"]
        chunks = events(served.post(path, stream=True, **fields))
        for choice in plain["choices"]:
            own = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
            text = "".join(part.get("text", "") or part.get("delta", {}).get("content", "") for part in own)
            assert text == choice.get("text", choice.get("message", {}).get("content"))
            assert own[-1]["finish_reason"] == choice["finish_reason"]


@pytest.mark.covers("A11.2", "A9.128")
def test_n_needs_sampling_and_too_many_harm_nobody(compared: Compared) -> None:
    choices = compared.completion(n=3, temperature=1.0, seed=1)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    compared.agree("three", choices)
    assert compared.refused(n=2, temperature=0)["param"] == "n"
    assert compared.refused(n=2, top_k=1)["param"] == "n"
    assert compared.refused(n=10**6, temperature=1.0)["param"] == "n"
    assert compared.text()


@pytest.mark.covers("A11.1", "A11.5", "A11.6", "A9.129", "A9.132")
def test_the_guides_rules_of_beam_search(served: Served, oracle: Oracle) -> None:
    guides_three = {"use_beam_search": True, "best_of": 2, "top_k": -1, "length_penalty": 0.8}
    assert served.text(**guides_three) == oracle.generate(num_beams=2, length_penalty=0.8)[0]
    rules: list[tuple[dict[str, Any], str]] = [
        ({"n": 1}, "n"), ({"n": 2, "top_p": 0.9}, "top_p"), ({"n": 2, "top_k": 4}, "top_k"),
        ({"n": 2, "temperature": 0.3}, "temperature"), ({}, "n"),
    ]  # fmt: skip
    for fields, param in rules:
        assert served.refused(**{"use_beam_search": True, "temperature": 0} | fields)["param"] == param
    assert served.refused(length_penalty=0.8, top_k=-1)["param"] == "length_penalty"


@pytest.mark.covers("A9.135")
def test_the_guides_chat_as_printed(compared: Compared) -> None:
    body = {
        "messages": [{"role": "user", "content": "hello"}], "max_tokens": 100, "top_k": -1, "top_p": 1,
        "temperature": 0, "ignore_eos": False, "stream": False,
    }  # fmt: skip
    answer = compared.post("/v1/chat/completions", **body)

    assert answer.status_code == 200, answer.text
    compared.agree("answer", answer.json()["choices"])


@pytest.mark.covers("A8.116")
def test_combined_and_p_d_agree_with_everything_at_once(compared: Compared) -> None:
    fields = {
        "prompt": [PROMPT, "what is the capital"], "n": 3, "best_of": 4, "seed": 5, "temperature": 0.9, "top_p": 0.95,
        "top_k": 50, "min_p": 0.01, "presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1,
        "logit_bias": {"40": 1.5}, "bad_words": ["fox"], "max_tokens": 20, "min_tokens": 3, "stop": ["zz"],
        "logprobs": 3, "echo": True, "return_token_ids": True,
    }  # fmt: skip
    choices = compared.post("/v1/completions", **fields).json()["choices"]

    assert [choice["index"] for choice in choices] == list(range(6))
    compared.agree("ids", [choice["token_ids"] for choice in choices])
    compared.agree("texts", [choice["text"] for choice in choices])
    for choice in choices:
        reported = choice["logprobs"]
        assert len(reported["tokens"]) == len(choice["prompt_token_ids"]) + len(choice["token_ids"])
        compared.agree(f"likeliest {choice['index']}", [sorted(best or {}) for best in reported["top_logprobs"]])


@pytest.mark.covers("B.logprobs.1", "B.logprobs.2")
def test_logprobs_are_the_log_softmax_across_p_and_d(served: Served, oracle: Oracle) -> None:
    choice = served.completion(logprobs=2, echo=True, return_token_ids=True)["choices"][0]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    expected = oracle.logprobs(ids)

    for at in range(1, len(ids)):
        row = expected[at - 1]
        assert choice["logprobs"]["token_logprobs"][at] == pytest.approx(row[ids[at]].item(), abs=1e-4)
        assert max(choice["logprobs"]["top_logprobs"][at].values()) == pytest.approx(row.max().item(), abs=1e-4)
    chat = served.chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in chat] == [2] * len(chat)
    assert json.dumps(chat)
