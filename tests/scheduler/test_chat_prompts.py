"""From conversations to token ids, compared with transformers' tokenizer of the same folder."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from scheduler.model.files import read_model_files
from scheduler.templates.chat_options import ChatOptions, ChatSettings
from scheduler.tokens import Tokens
from wire.errors import ConfigError, InvalidRequest, PromptTooLong

pytestmark = pytest.mark.anyio
MakeModel = Callable[..., Path]
Refused = Callable[[Tokens], Awaitable[object]]

TALK = [{"role": "user", "content": "hello world"}, {"role": "assistant", "content": "good  "}]
SHOWS_ALL = "{{ bos_token }}|{{ tone }}|{{ documents | tojson }}|{{ tools | tojson }}|{{ messages[0].content }}"


@asynccontextmanager
async def opened(
    folder: Path, settings: ChatSettings | None = None, template: str | None = None
) -> AsyncIterator[Tokens]:
    """The folder's tokens, whose processes end with the block."""
    tokens = Tokens(read_model_files(str(folder), chat_template=template), settings or ChatSettings())
    try:
        yield tokens
    finally:
        await tokens.close()


@pytest.mark.parametrize(
    "options",
    [
        ChatOptions(),
        ChatOptions(add_generation_prompt=False),
        ChatOptions(add_generation_prompt=False, continue_final_message=True),
        ChatOptions(template=SHOWS_ALL, template_kwargs={"tone": "dry"}, documents=[{"title": "t", "text": "x"}]),
    ],
    ids=["as usual", "closed", "open", "all"],
)
async def test_ids_equal_apply_chat_template(make_model: MakeModel, options: ChatOptions) -> None:
    folder = make_model(bos_token="<|endoftext|>")
    oracle: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = oracle.apply_chat_template(
        TALK, add_generation_prompt=options.add_generation_prompt, documents=options.documents or None,
        continue_final_message=options.continue_final_message, chat_template=options.template, return_dict=False,
        **options.template_kwargs,
    )  # fmt: skip

    async with opened(folder) as tokens:
        assert list(await tokens.encode_chat(TALK, options)) == expected
        text = await tokens.render_chat(TALK, options)

    assert oracle.encode(text, add_special_tokens=False) == expected


async def test_special_tokens_are_added_on_request(make_model: MakeModel) -> None:
    async with opened(make_model(add_bos_token=True)) as tokens:
        plain = await tokens.encode_chat(TALK)
        added = await tokens.encode_chat(TALK, ChatOptions(add_special_tokens=True))

    assert len(added) == len(plain) + 1
    assert added[1:] == plain


async def test_default_kwargs_are_overridden_by_the_requests(model_folder: Path) -> None:
    settings = ChatSettings(default_kwargs={"tone": "dry", "length": 1})
    shows = ChatOptions(template="{{ tone }}{{ length }}", template_kwargs={"tone": "warm"})

    async with opened(model_folder, settings) as tokens:
        assert await tokens.render_chat(TALK, shows) == "warm1"


async def test_the_settings_choose_the_content_format(model_folder: Path) -> None:
    shows = ChatOptions(template="{{ messages[0].content }}")

    async with opened(model_folder, ChatSettings(content_format="openai")) as tokens:
        assert await tokens.render_chat(TALK, shows) == "[{'type': 'text', 'text': 'hello world'}]"
    async with opened(model_folder, ChatSettings(content_format="string")) as tokens:
        assert await tokens.render_chat(TALK, shows) == "hello world"


async def test_special_tokens_are_read_from_either_file(make_model: MakeModel) -> None:
    folder = make_model(bos_token=None)
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|x|>"}')

    files = read_model_files(str(folder))

    assert files.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


async def test_a_model_without_template_accepts_only_the_requests_template(make_model: MakeModel) -> None:
    async with opened(make_model(chat_template=None)) as tokens:
        await tokens.start()
        with pytest.raises(InvalidRequest, match="has no chat template"):
            await tokens.encode_chat(TALK)
        assert await tokens.render_chat(TALK, ChatOptions(template="{{ messages[0].content }}")) == "hello world"


async def test_a_chat_with_tools_has_the_models_template_for_tools(make_model: MakeModel) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    folder, tools = make_model(chat_template=named), ({"type": "function", "function": {"name": "f"}},)
    async with opened(folder) as tokens:
        assert await tokens.render_chat(TALK) == "plain"
        assert await tokens.render_chat(TALK, ChatOptions(tools=tools)) == "1 tools"
        assert await tokens.render_chat(TALK, ChatOptions(tools=tools, template="mine")) == "mine"

    assert read_model_files(str(folder), chat_template="default").tool_template is None
    assert read_model_files(str(make_model())).tool_template is None


async def test_a_conversation_longer_than_the_model_is_an_error_of_messages(model_folder: Path) -> None:
    async with opened(model_folder) as tokens:
        with pytest.raises(PromptTooLong) as refused:
            await tokens.encode_chat([{"role": "user", "content": "a" * 100_000}])

    assert refused.value.param == "messages"


@pytest.mark.parametrize("options", [ChatOptions(template="{{ 1 }}"), ChatOptions(template_kwargs={"messages": []})])
async def test_forbidden_fields_are_refused_on_both_routes(model_folder: Path, options: ChatOptions) -> None:
    async with opened(model_folder, ChatSettings(trust_request_template=False)) as tokens:
        calls: list[Refused] = [lambda t: t.encode_chat(TALK, options), lambda t: t.render_chat(TALK, options)]
        for call in calls:
            with pytest.raises(InvalidRequest, match="chat_template"):
                await call(tokens)


@pytest.mark.covers("A5.74")
async def test_an_invalid_operators_template_stops_the_start(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--chat-template \./nothing\.jinja is neither a readable file"):
        read_model_files(str(model_folder), chat_template="./nothing.jinja")
    async with opened(model_folder, template="{% for %}") as tokens:
        with pytest.raises(ConfigError, match=r"--chat-template: .*TemplateSyntaxError"):
            await tokens.start()


async def test_a_models_broken_template_fails_only_chats(make_model: MakeModel) -> None:
    async with opened(make_model(chat_template="{% for %}")) as tokens:
        with pytest.raises(InvalidRequest, match="TemplateSyntaxError"):
            await tokens.start()
        assert await tokens.render_chat(TALK, ChatOptions(template="fine")) == "fine"
