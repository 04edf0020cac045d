"""The limits of a template and of its process: memory, time, files, names."""

import asyncio
import contextlib

import pytest
from jinja2.exceptions import SecurityError, UndefinedError

from scheduler.templates.environment import environment
from scheduler.templates.sandbox import answer, compiler, render
from scheduler.templates.templates import TemplateRenderer
from wire.errors import InvalidRequest

ENDED = "s of CPU time, or too much memory"
DEEP = f"RecursionError|MemoryError|SyntaxError|{ENDED}"  # whichever of jinja and Python gives up first
FAT = (
    "{{ 'a' * 10**9 }}",
    "{{ 'a' * 10**10 }}",
    "{{ [0] * 10**7 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{% set n = namespace(s='a' * 2**20) %}{% for i in range(20) %}{% set n.s = n.s * 2 %}{% endfor %}",
    "{{ range(99999) | batch(1) | list * 99 }}",
)
DEEPLY_NESTED = (
    "{{" + "(" * 100_000 + ")" * 100_000 + "}}",
    "{{" + "-" * 100_000 + "1}}",
    "{{" + "[" * 100_000 + "}}",
    "{{ a" + "|string" * 10_000 + "}}",
    "{% if 1 %}" * 20_000 + "{% endif %}" * 20_000,
    "{% macro a() %}{{ b() }}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
)
ENDLESS = (
    "{{ 9 ** (9 ** 9) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
)
MORE_ENDLESS = (
    "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}",
    "{% macro a(n) %}{% for i in range(9) %}{{ caller(n) }}{% endfor %}{% endmacro %}"
    "{% call(n) a(1) %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endcall %}",
    "{{ lipsum(n=10**6) }}",
    "{{ 1" + " + 1" * 50_000 + "}}",
)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("template", "words", "seconds"),
    [
        *((template, "MemoryError", 30) for template in FAT),
        *((template, DEEP, 30) for template in DEEPLY_NESTED),
        *((template, f"more than 0.2 {ENDED}", 0.2) for template in ENDLESS),
        *(
            pytest.param(template, f"more than 1 {ENDED}|{DEEP}", 1, marks=pytest.mark.long)
            for template in MORE_ENDLESS
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) and "{" in value else "",
)
async def test_a_hostile_template_is_refused_and_the_next_one_rendered(
    template: str, words: str, seconds: float
) -> None:
    renderer = TemplateRenderer(seconds, 30)
    try:
        with pytest.raises(InvalidRequest, match=words):
            await renderer.render(template, {"messages": [], "a": 1}, of_request=True)

        assert await renderer.render("fine", {}, of_request=True) == "fine"
    finally:
        await renderer.close()


@pytest.mark.anyio
async def test_a_render_may_add_64_mb_to_the_idle_process() -> None:
    renderer = TemplateRenderer(30, 30)
    try:
        assert await renderer.render("{{ ('a' * n) | length }}", {"n": 50 * 2**20}) == str(50 * 2**20)
        with pytest.raises(InvalidRequest, match="MemoryError"):
            await renderer.render("{{ ('a' * n) | length }}", {"n": 68 * 2**20})
    finally:
        await renderer.close()


@pytest.mark.anyio
async def test_a_process_that_keeps_memory_answers_and_is_replaced() -> None:
    """Jinja multiplies constants when it compiles: the texts stay in its cache of compiled templates."""
    renderer = TemplateRenderer(30, 30)
    try:
        await renderer.start("fine")
        before = renderer.pids
        fat = [f"{{{{ ('{letter}' * 4000000)[n:] | length }}}}" for letter in "abcdefgh"]
        answers = await asyncio.gather(*(renderer.render(template, {"n": 1}) for template in fat))

        assert answers == ["3999999"] * 8
        assert await renderer.render("fine", {}) == "fine"
        assert renderer.pids != before
    finally:
        await renderer.close()


@pytest.mark.anyio
async def test_every_filter_and_test_works_where_no_file_opens() -> None:
    """Some of them import modules at first use, which a process without files can no longer do."""
    uses = [f"{{{{ [3, 1, 2] | {use} | string | length > 0 }}}}" for use in ON_LISTS]
    uses += [f"{{{{ 'a <b> &amp; c' | {use} | string | length > 0 }}}}" for use in ON_TEXT]
    uses += [f"{{{{ {use} }}}}" for use in OTHERS]
    renderer = TemplateRenderer()
    try:
        for use in uses:
            inside = await renderer.render(use, {})
            assert "random" in use or inside == render(compiler()(use), {}), use
    finally:
        await renderer.close()


ON_LISTS = (
    "batch(2)", "count", "default", "first", "join", "last", "length", "list", "map('string')", "max", "min", "pprint",
    "random", "reject('odd')", "reverse", "select('odd')", "slice(2)", "sort", "string", "sum", "tojson", "unique",
)  # fmt: skip
ON_TEXT = (
    "capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower", "replace('a', 'b')", "safe",
    "striptags", "title", "trim", "truncate(5)", "upper", "urlencode", "urlize", "wordcount", "wordwrap(3)",
)  # fmt: skip
OTHERS = (
    "12345 | filesizeformat", "'1.5' | float | round", "{'a': 1} | dictsort", "{'a': 1} | xmlattr",
    "{'a': 1} | items | list",
    "[{'a': 1}] | groupby('a')", "'\\N{BULLET}'", "strftime_now('%d %b %Y %Z') | length > 0",
    "lipsum() | length > 0", "cycler(1, 2).next()", "joiner()()", "range(3) | list",
)  # fmt: skip


@pytest.mark.anyio
async def test_a_file_that_python_would_open_is_refused_without_its_path() -> None:
    renderer = TemplateRenderer()
    try:
        with pytest.raises(InvalidRequest, match=r"render this: OSError: a chat template must not open files$"):
            await renderer.render("{{ 'a'.encode('punycode') }}", {})
    finally:
        await renderer.close()


def test_a_reply_is_the_text_or_an_error() -> None:
    compiled = compiler()

    assert answer("{{ a }}", b'{"context": {"a": 1}}', compiled) == (b"t", b"1")
    assert answer("{% for %}", b'{"context": null}', compiled)[0] == b"e"
    assert answer("fine", b'{"context": null}', compiled) == (b"t", b"")
    assert answer("fine", b"not json", compiled)[0] == b"e"
    assert answer("fine", b"[]", compiled)[0] == b"e"


@pytest.mark.parametrize(
    "escape",
    [
        "(''|attr('format')|attr('__globals__')).x",
        "x.__init__.y",
        "''.format.__self__.z",
        "dict.mro().x",
        "dict.__class__.x",
        "namespace.__init__.x",
        "namespace(__class__=1).x.y",
        "('%s'|format(x)).__class__.y",
        "''.format_map({'a': x}).__class__.y",
        "('{0.__class__}'|attr('format'))(x).y",
        "raise_exception.__globals__.x",
        "strftime_now.__globals__.x",
        "x|map(attribute='__class__')|list|first|attr('mro')",
        "lipsum.__globals__.os.x",
    ],
)
def test_attributes_with_underscores_are_out_of_reach(escape: str) -> None:
    text = ""
    with contextlib.suppress(SecurityError, UndefinedError):
        text = environment().from_string("{{ " + escape + " }}").render({"x": {}})

    assert text == ""
