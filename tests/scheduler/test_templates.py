"""Chat templates in their own process: right text, no way out, no way to hang."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from jinja2.exceptions import SecurityError, UndefinedError

from scheduler.template_sandbox import answer, environment, render
from scheduler.templates import TemplateRenderer
from wire.errors import InvalidRequest

pytestmark = pytest.mark.anyio


@pytest.fixture
async def renderer() -> AsyncIterator[TemplateRenderer]:
    """A renderer whose child ends with the test."""
    made = TemplateRenderer()
    yield made
    await made.close()


async def test_it_renders_as_templates_of_models_expect(renderer: TemplateRenderer) -> None:
    template = (
        "{%- for message in messages %}\n  {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "  {{- message | tojson }}\n{%- endfor %}\n{% generation %}{{ eos_token }}{% endgeneration %}"
    )
    context = {"messages": [{"content": "<你>"}, {"content": "b"}], "eos_token": "</s>"}

    assert await renderer.render(template, context) == '{"content": "<你>"}</s>'


async def test_its_text_equals_transformers_own(renderer: TemplateRenderer) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (
        "{% set ns = namespace(n=0) %}\n{% for message in messages %}\n    {% set ns.n = ns.n + 1 %}\n"
        "  {% if message.role == 'user' %}\n[{{ ns.n }}] {{ message.content | trim }}\n  {% endif %}\n{% endfor %}\n"
        "{% if add_generation_prompt %}>>{% endif %}{{ bos_token }}"
    )
    messages = [{"role": "user", "content": " a "}, {"role": "assistant", "content": "b"}]
    expected, _ = render_jinja_template(
        conversations=[messages], chat_template=template, add_generation_prompt=True, bos_token="<s>"
    )

    context = {"messages": messages, "add_generation_prompt": True, "bos_token": "<s>"}
    assert await renderer.render(template, context) == expected[0]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__ }}", "SecurityError"),
        ("{{ 'a' * 10**10 }}", "MemoryError"),
        ("{% for i in range(9**9) %}{% endfor %}", "OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "more than 8388608 characters"),
    ],
)
async def test_a_bad_template_is_the_requests_error_in_its_own_words(
    renderer: TemplateRenderer, template: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await renderer.render(template, {"messages": []})

    assert await renderer.render("fine", {}) == "fine"


async def test_a_template_that_never_ends_is_killed_and_the_next_one_rendered() -> None:
    renderer = TemplateRenderer(render_timeout_s=0.05)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    try:
        with pytest.raises(InvalidRequest, match=r"longer than 0\.05 s"):
            await renderer.render(endless, {})
    finally:
        await renderer.close()


async def test_a_child_that_died_is_replaced(renderer: TemplateRenderer) -> None:
    await renderer.start()
    child = renderer._child
    assert child is not None
    child.kill()
    await asyncio.wait_for(child.wait(), 10)

    assert await renderer.render("fine", {}) == "fine"


async def test_renders_at_once_take_turns(renderer: TemplateRenderer) -> None:
    texts = await asyncio.gather(*(renderer.render("{{ n }}", {"n": n}) for n in range(20)))

    assert texts == [str(n) for n in range(20)]


async def test_a_cancelled_render_leaves_no_answer_for_the_next(renderer: TemplateRenderer) -> None:
    await renderer.start()
    slow = asyncio.create_task(renderer.render("{% for i in range(99999) %}{% endfor %}slow", {}))
    await asyncio.sleep(0)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow

    assert await renderer.render("next", {}) == "next"


def test_the_child_answers_every_request_with_json() -> None:
    compiled: Any = environment().from_string

    assert json.loads(answer(b'{"template": "{{ a }}", "context": {"a": 1}}', compiled)) == {"text": "1"}
    assert "error" in json.loads(answer(b"not json", compiled))
    assert "error" in json.loads(answer(b"[]", compiled))


@pytest.mark.parametrize(
    "escape", ["(''|attr('format')|attr('__globals__')).x", "x.__init__.y", "''.format.__self__.z"]
)
def test_attributes_with_underscores_are_out_of_reach(escape: str) -> None:
    with pytest.raises((SecurityError, UndefinedError)):
        render(environment().from_string("{{ " + escape + " }}"), {"x": {}})
