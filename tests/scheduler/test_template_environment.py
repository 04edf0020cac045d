"""The jinja environment of chat templates, compared with transformers'."""

import pytest
from jinja2.exceptions import SecurityError
from transformers.utils.chat_template_utils import render_jinja_template

from scheduler.templates.sandbox import compiler, render

SOURCES = (
    "  {% if true %}\n  a\n  {% endif %}\nb\n",
    "{%- for i in [0, 1, 2, 3] %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
    "{% endfor %}",
    "{{ {'a': '<é&\\'>', 'b': [1, 2.5, none, true]} | tojson }}",
    "{{ {'b': 1, 'a': '你'} | tojson(indent=2, sort_keys=true, ensure_ascii=true) }}",
    "{{ [1, 2] | tojson(separators=(',', ':')) }}",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% for i in [1, 2] %}{% generation %}{{ loop.index }}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(a=1, self=2) %}{% set ns.b = 3 %}{{ ns.a }}{{ ns.b }}{{ ns.self }}",
    "{{ dict(a=1, b=2) }}{{ dict([('a', 1)]) }}{{ dict.fromkeys(['x'], 0) }}",
    "{{ messages[0].content.split('x')[-1].lstrip('\\n') }}{{ messages[0]['content'][::-1] }}",
    "{{ '%s-%d' % ('a', 3) }}{{ '{}'.format(1) }}{{ undefined_thing is defined }}{{ undefined_thing }}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{% call m(1) %}c{% endcall %}{{ m(5) }}",
    "{% filter upper %}abc{% endfilter %}{% with a = 1 %}{{ a }}{% endwith %}{% raw %}{{ a }}{% endraw %}",
    "{{ strftime_now('%Y-%m-%d') }}",
)


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_prints_what_it_prints_for_transformers(source: str) -> None:
    messages = [{"role": "user", "content": "\n<a>x\ny"}]
    expected, _ = render_jinja_template(conversations=[messages], chat_template=source)

    assert render(compiler()(source), {"messages": messages}) == expected[0]


@pytest.mark.parametrize("source", ["{{ namespace(_a=1) }}", "{% set ns = namespace() %}{% set ns.__a = 1 %}"])
def test_a_namespace_accepts_no_private_name(source: str) -> None:
    with pytest.raises(SecurityError, match="underscore"):
        render(compiler()(source), {})
