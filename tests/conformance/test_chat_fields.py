"""Chats as users of today's vLLM write them, combined and over P/D."""

import pytest

from tests.conformance.served import CHAT, Compared, Oracle, Served

pytestmark = pytest.mark.cluster

CHATS = "/v1/chat/completions"
PREFILL = [*CHAT, {"role": "assistant", "content": "The capital"}]


@pytest.mark.covers("B.chat.1")
def test_max_completion_tokens_takes_precedence(served: Served) -> None:
    assert served.chat(max_tokens=9, max_completion_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
    for bad in (0, -1, 513):
        assert served.refused(CHATS, max_completion_tokens=bad)["param"] == "max_completion_tokens"


@pytest.mark.covers("B.chat.2")
def test_top_logprobs_null_is_none_and_all_only_if_allowed(served: Served) -> None:
    for top in (None, 0):
        content = served.chat(logprobs=True, top_logprobs=top)["choices"][0]["logprobs"]["content"]
        assert [entry["top_logprobs"] for entry in content] == [[]] * len(content)
    for top in (-1, 21):
        assert served.refused(CHATS, logprobs=True, top_logprobs=top)["param"] == "top_logprobs"
    assert served.refused(CHATS, top_logprobs=2)["param"] == "top_logprobs"


@pytest.mark.covers("B.chat.3", "B.chat.4")
def test_seeds_of_64_bits_and_four_stop_texts(compared: Compared) -> None:
    for seed in (-(2**63), 2**63 - 1):
        compared.agree(f"seed {seed}", compared.chat_text(seed=seed, temperature=1.0))
    for bad in (-(2**63) - 1, 2**63, 1.5, "1"):
        assert compared.refused(CHATS, seed=bad)["param"] == "seed"
    assert compared.chat_text(stop=["%", "^", "~", "`"]) is not None
    assert compared.refused(CHATS, stop=["%", "^", "~", "`", "|"])["param"] == "stop"


@pytest.mark.covers("B.chat.6")
def test_reasoning_effort_and_include_reasoning_are_accepted(served: Served) -> None:
    template = "{{ reasoning_effort | default('none') }}"
    plain = served.chat_text(chat_template="none")

    assert (
        served.chat_text(chat_template=template)
        == served.chat_text(chat_template=template, include_reasoning=False)
        == plain
    )
    for effort in ("low", "high"):
        assert served.chat_text(chat_template=template, reasoning_effort=effort) == served.chat_text(
            chat_template=effort
        )


@pytest.mark.covers("B.chat.8")
def test_the_last_message_is_continued_without_a_new_one(served: Served, oracle: Oracle) -> None:
    text = oracle.tokenizer.apply_chat_template(PREFILL, tokenize=False, continue_final_message=True)
    expected = oracle.generate(text)[0]

    assert served.chat_text(PREFILL, continue_final_message=True, add_generation_prompt=False) == expected
    assert served.chat_text(PREFILL, continue_final_message=True) == expected
    both = {"messages": PREFILL, "continue_final_message": True, "add_generation_prompt": True}
    assert served.refused(CHATS, **both)["param"] == "continue_final_message"


@pytest.mark.covers("B.chat.11")
def test_reasoning_is_read_under_both_of_its_names(served: Served) -> None:
    template = "{% for message in messages %}{{ message.reasoning_content }}{{ message.content }}{% endfor %}"
    answers = {
        name: served.chat_text([{"role": "assistant", "content": "b", name: "quick brown"}], chat_template=template)
        for name in ("reasoning", "reasoning_content", "thoughts")
    }

    assert answers["reasoning"] == answers["reasoning_content"] == served.chat_text(chat_template="quick brownb")
    assert answers["thoughts"] == served.chat_text([{"role": "assistant", "content": "b"}], chat_template=template)
