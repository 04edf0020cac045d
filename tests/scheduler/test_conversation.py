"""Conversations as templates get them, compared with transformers' apply_chat_template."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from scheduler.templates.content_format import ContentFormat
from scheduler.templates.conversation import cut_at_mark, left_open, shaped
from scheduler.templates.sandbox import compiler, render

TAKES_TEXT = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRIMS = "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] | trim }}\n\n{% endfor %}"
TAKES_PARTS = (
    "{%- for m in messages -%}\n<{{ m['role'] }}>\n{%- for part in m['content'] -%}\n"
    "{%- if part['type'] == 'text' -%}{{ part['text'] }}{%- else -%}<{{ part['type'] }}>{%- endif -%}\n"
    "{%- endfor -%}\n{%- endfor -%}{{ '|end' }}"
)
TAKES_EITHER = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{{ part.text }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ m.role }}: {{ show(m.content) }}\n{% endfor %}"
)
THINKS = (
    "{% for m in messages %}{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{{ '' if m.tool_calls is defined else ';' }}{% endfor %}{{ documents }}{{ tools }}"
)
TALK = [
    {"role": "system", "content": "Be  brief.\n"},
    {"role": "user", "content": " Hi\n there "},
    {"role": "assistant", "content": "Well,  \n"},
]


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the same content in parts."""
    return [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]


def ours(template: str, messages: list[dict[str, Any]], open_last: bool = False, **context: Any) -> str:
    """Render as the sandbox does."""
    plain: dict[str, Any] = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": False}
    return render(compiler()(template), plain | context, continue_final_message=open_last)


def theirs(template: str, messages: list[dict[str, Any]], open_last: bool = False, **context: Any) -> str:
    """Render as apply_chat_template does, which drops nulls before it passes messages on."""
    without_nulls = [{k: v for k, v in m.items() if v is not None} for m in messages]
    texts, _ = render_jinja_template(
        conversations=[without_nulls], chat_template=template, continue_final_message=open_last, **context
    )
    return str(texts[0])


@pytest.mark.parametrize("template", [TAKES_TEXT, TRIMS, TAKES_EITHER, THINKS])
@pytest.mark.parametrize(
    "context", [{}, {"add_generation_prompt": True, "bos_token": "<s>"}], ids=["as it is", "requested"]
)
@pytest.mark.parametrize("open_last", [False, True])
def test_texts_render_as_in_transformers(template: str, context: dict[str, Any], open_last: bool) -> None:
    assert ours(template, TALK, open_last, **context) == theirs(template, TALK, open_last, **context)


@pytest.mark.parametrize("template", [TAKES_PARTS, TAKES_EITHER])
@pytest.mark.parametrize("open_last", [False, True])
def test_parts_render_as_in_transformers(template: str, open_last: bool) -> None:
    messages = in_parts(TALK)

    assert ours(template, messages, open_last) == theirs(template, messages, open_last)


@pytest.mark.parametrize("content", ["", " ", "a", "a ", "a\n\n", " a b", "PDSERVE_CONTINUES_FROM_HERE", "你好\u3000"])
@pytest.mark.parametrize("template", [TAKES_TEXT, TRIMS])
def test_an_open_message_ends_where_transformers_ends_it(template: str, content: str) -> None:
    messages = [*TALK[:-1], {"role": "assistant", "content": content}]

    assert ours(template, messages, open_last=True) == theirs(template, messages, open_last=True)


def test_the_last_text_part_is_the_one_left_open() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}, {"type": "image"}]
    messages = [{"role": "assistant", "content": parts}]

    assert ours(TAKES_PARTS, messages, open_last=True) == theirs(TAKES_PARTS, messages, open_last=True)
    assert parts[1] == {"type": "text", "text": "b "}, "the caller's messages stay as they are"


@pytest.mark.parametrize(
    ("template", "message", "words"),
    [
        (TAKES_TEXT, {"role": "assistant"}, "has no content"),
        (TAKES_TEXT, {"role": "assistant", "content": None}, "has no content"),
        ("{{ messages[0].role }}", {"role": "a", "content": "b"}, "does not print any content"),
        ("{{ messages[0].role }}{# content #}", {"role": "a", "content": "b"}, "message unchanged"),
        ("{{ messages[0].content[:3] }}", {"role": "a", "content": "bcde"}, "message unchanged"),
        (TAKES_PARTS, {"role": "a", "content": [{"type": "image"}]}, "no text to continue"),
    ],
)
def test_an_open_message_is_refused_where_transformers_refuses_it(
    template: str, message: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ours(template, [message], open_last=True)
    with pytest.raises(ValueError, match="continue_final_message"):
        theirs(template, [message], open_last=True)


@pytest.mark.parametrize("name", ["reasoning", "thinking", "reasoning_content"])
def test_reasoning_is_found_under_each_of_its_names(name: str) -> None:
    messages = [{"role": "assistant", "content": "b", name: "hm", "tool_calls": None}]

    assert ours(THINKS, messages) == theirs(THINKS, messages)
    assert ours(THINKS, messages).startswith("<think>hm</think>b;")


def test_a_text_becomes_a_part_where_the_template_loops_over_parts() -> None:
    """Unlike transformers, where a text would be printed letter by letter, or not at all."""
    assert ours(TAKES_PARTS, TALK) == theirs(TAKES_PARTS, in_parts(TALK))


def test_parts_become_lines_where_the_template_expects_text() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]

    assert ours(TRIMS, messages) == "[user]\na\nb\n\n"


def test_contents_both_formats_accept_are_unchanged() -> None:
    messages: list[dict[str, Any]] = [{"role": "a", "content": "b"}, {"role": "a", "content": [{"text": "b"}]}]

    assert shaped(messages, ContentFormat.EITHER) == messages


def test_documents_and_tools_reach_the_template() -> None:
    context: dict[str, Any] = {"documents": [{"title": "t", "text": "x"}], "tools": [{"type": "function"}]}

    assert ours(THINKS, TALK, **context) == theirs(THINKS, TALK, **context)


def test_the_marker_is_cut_at_its_last_occurrence() -> None:
    marked, text = left_open([{"role": "a", "content": "x"}], "content")
    printed = marked[0]["content"]

    assert cut_at_mark(f"{printed}|{printed}|", text) == f"{printed}|x"
