"""openai (Python): models, chats, streams, completions, errors, and retries under overload."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.cluster.guide import GuideCluster
from tests.engine.tiny_models import VOCAB_SIZE, save_tiny_tokenizer

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


NUM_CALLS, NUM_TOKENS = 60, 200


async def _call_at_once(url: str) -> tuple[list[object], int, int]:
    """Send calls that take 24 s together, and one that alone takes too long. Return results and numbers of requests."""
    sent: list[httpx.Request] = []

    async def count(request: httpx.Request) -> None:
        sent.append(request)

    http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [count]}, trust_env=False)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, http_client=http) as client:

        async def call(length: int) -> object:
            return await client.completions.create(model="tiny", prompt=[5] * length, max_tokens=2)

        await call(NUM_TOKENS)  # measures steps
        sent.clear()
        results = await asyncio.gather(*(call(NUM_TOKENS) for _ in range(NUM_CALLS)), return_exceptions=True)
        num_sent = len(sent)
        with pytest.raises(openai.RateLimitError, match="on an idle cluster"):
            await call(2 * NUM_TOKENS + 100)
    return list(results), num_sent, len(sent) - num_sent


@pytest.mark.long
def test_calls_refused_for_their_first_token_retry_little(tmp_path: Path) -> None:
    """The client retries each call twice unless the answer says that it should not."""
    (tmp_path / "model").mkdir()
    save_tiny_tokenizer(tmp_path / "model")
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "eos_token_id": 2}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "model/fake.json").write_text(json.dumps({"token_seconds": 0.002}))
    flags = ("--engine=fake", "--no-enable-prefix-caching", "--ttft-limit=0.9")
    with GuideCluster(tmp_path, tmp_path / "model", flags=flags) as cluster:
        results, num_sent, num_never = asyncio.run(_call_at_once(cluster.up().client.base_url))

    refused = [one for one in results if isinstance(one, openai.RateLimitError)]
    num_accepted = NUM_CALLS - len(refused)
    assert not [one for one in results if isinstance(one, BaseException) and one not in refused]
    assert all("the first token is expected after" in str(one) for one in refused)
    assert NUM_CALLS / 2 < len(refused) < NUM_CALLS
    assert NUM_CALLS < num_sent <= NUM_CALLS + 5 + 0.15 * num_accepted
    assert num_never == 1, "where even an idle cluster takes too long, a retry cannot help"
