"""The options of a request for its chat template."""

import inspect
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from scheduler.config import parse
from scheduler.templates.chat_options import (
    MAX_KWARGS_BYTES,
    MAX_TEMPLATE_BYTES,
    RESERVED_KWARGS,
    ChatOptions,
    ChatSettings,
)
from wire.errors import ConfigError, InvalidRequest

NEEDED = ["--model", "m"]


def test_a_requests_template_is_used_unless_forbidden() -> None:
    ChatSettings().check(ChatOptions(template="{{ 1 }}"))

    with pytest.raises(InvalidRequest, match="chat_template_not_allowed") as refused:
        ChatSettings(trust_request_template=False).check(ChatOptions(template="{{ 1 }}"))
    assert refused.value.param == "chat_template"
    ChatSettings(trust_request_template=False).check(ChatOptions(template_kwargs={"enable_thinking": False}))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("é" * (MAX_TEMPLATE_BYTES // 2) + "a", f"{MAX_TEMPLATE_BYTES + 1} bytes, but the limit is"),
    ],
    ids=["nothing", "blank", "long"],
)
def test_an_invalid_template_is_refused(template: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        ChatSettings().check(ChatOptions(template=template))


def test_a_template_at_the_size_limit_is_accepted() -> None:
    ChatSettings().check(ChatOptions(template="a" * MAX_TEMPLATE_BYTES))


@pytest.mark.parametrize("name", sorted(RESERVED_KWARGS))
def test_a_reserved_name_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs.{name} is reserved") as refused:
        ChatSettings().check(ChatOptions(template_kwargs={"fine": 1, name: 1}))

    assert refused.value.param == f"chat_template_kwargs.{name}"


def test_no_argument_of_apply_chat_template_is_passed_through() -> None:
    """Arguments of apply_chat_template and fields of the request reach no template as variables."""
    theirs = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"kwargs"}

    assert theirs <= RESERVED_KWARGS
    assert {"messages", "bos_token", "eos_token"} <= RESERVED_KWARGS


def test_kwargs_are_bounded_in_bytes() -> None:
    room = MAX_KWARGS_BYTES - len('{"a":""}')
    ChatSettings().check(ChatOptions(template_kwargs={"a": "x" * room}))

    with pytest.raises(InvalidRequest, match=f"{MAX_KWARGS_BYTES + 1} bytes, but the limit is {MAX_KWARGS_BYTES}"):
        ChatSettings().check(ChatOptions(template_kwargs={"a": "x" * (room + 1)}))
    with pytest.raises(InvalidRequest, match="cannot be written as JSON"):
        ChatSettings().check(ChatOptions(template_kwargs={"a": "\ud800"}))


def test_a_document_that_is_not_an_object_is_named() -> None:
    documents: Any = [{"title": "t", "text": "x"}, "x"]

    with pytest.raises(InvalidRequest, match=r"documents\.1 is not an object"):
        ChatSettings().check(ChatOptions(documents=documents))


def test_the_flags_set_the_chat_options() -> None:
    assert parse(NEEDED).options.chat_settings(keyed=False) == ChatSettings()

    kwargs = ["--default-chat-template-kwargs", '{"enable_thinking": false}']
    others = ["--no-trust-request-chat-template", "--chat-template-content-format", "openai"]
    settings = parse([*NEEDED, *kwargs, *others]).options.chat_settings(keyed=False)

    assert settings == ChatSettings("openai", trust_request_template=False, default_kwargs={"enable_thinking": False})


@pytest.mark.parametrize(
    ("flags", "keyed", "trusted"),
    [
        ([], False, True),
        ([], True, False),
        (["--trust-request-chat-template"], True, True),
        (["--no-trust-request-chat-template"], False, False),
    ],
)
def test_templates_of_requests_are_off_where_a_key_is_set(flags: list[str], keyed: bool, trusted: bool) -> None:
    settings = parse([*NEEDED, *flags]).options.chat_settings(keyed=keyed)

    assert settings.trust_request_template is trusted


@pytest.mark.parametrize("text", ["[1]", "{", '{"messages": []}', '{"bos_token": "x"}', "true"])
def test_invalid_default_kwargs_are_refused_at_startup(text: str) -> None:
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs"):
        parse([*NEEDED, "--default-chat-template-kwargs", text])
