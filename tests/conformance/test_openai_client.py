"""openai (Python): models, chats, streams, completions and errors."""

from collections.abc import Iterator

import openai
import pytest

pytestmark = pytest.mark.cluster


@pytest.fixture
def client(pair: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert "tiny" in [model.id for model in client.models.list()]


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=8, temperature=0
    )

    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_a_streamed_chat_equals_the_plain_one_and_reports_the_hop(client: openai.OpenAI) -> None:
    chat = {
        "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
    }  # fmt: skip

    plain = client.chat.completions.create(**chat)  # type: ignore[call-overload]
    stream = client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    chunks = list(stream)

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    hop = chunks[-1].model_dump()["pdserve"]
    assert hop["path"] == "handoff"
    assert hop["kv_bytes"] > 0
    assert hop["transport"] == "shm"


def test_completions_of_several_prompts_come_in_order(client: openai.OpenAI) -> None:
    prompts = ["hello", "the quick brown fox", "what is the capital"]

    batched = client.completions.create(model="tiny", prompt=prompts, max_tokens=8, temperature=0)
    alone = [client.completions.create(model="tiny", prompt=one, max_tokens=8, temperature=0) for one in prompts]

    assert [choice.text for choice in batched.choices] == [answer.choices[0].text for answer in alone]


def test_a_prompt_longer_than_the_model_is_400_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"512.*600"):
        client.completions.create(model="tiny", prompt=[5] * 600, max_tokens=8)


def test_an_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such"):
        client.completions.create(model="no-such", prompt="hello")
