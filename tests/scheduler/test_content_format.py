"""The content format of a template, detected from its source."""

import pytest

from scheduler.templates.content_format import ContentFormat, expected_content_format
from scheduler.templates.environment import environment

TEXTS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}",
    "{% for m in messages %}{% for call in m.tool_calls %}{{ call.content }}{% endfor %}{% endfor %}",
    "{% for word in messages[0].content.split() %}{{ word }}{% endfor %}",
    "{% for word in messages[0]['content'] | wordwrap %}{{ word }}{% endfor %}",
    "{% set parts = messages %}{% for part in parts %}{{ part.content }}{% endfor %}",
    "{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}",
    "{% macro show(x) %}{% for y in x %}{{ y }}{% endfor %}{% endmacro %}{{ show(messages) }}",
    "{% for i in range(3) %}{{ i }}{% endfor %}",
)
PARTS = (
    "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}",
    "{% for part in messages[0]['content'] | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}",
    "{% for part in messages[0].content[1:] %}{{ part.text }}{% endfor %}",
    "{% set content = messages[0].content %}{% for part in content %}{{ part.text }}{% endfor %}",
    "{% set a = messages[0].content or [] %}{% set b = a %}{% for part in b | reverse %}{{ part }}{% endfor %}",
    "{% set ns = namespace(c='') %}{% set ns.c = messages[0].content %}{% for p in ns.c %}{{ p }}{% endfor %}",
    "{% macro show(x) %}{% for y in x %}{{ y }}{% endfor %}{% endmacro %}{{ show(messages[0].content) }}",
    "{% macro show(a, x) %}{% for y in x %}{{ y }}{% endfor %}{% endmacro %}{{ show(1, x=messages[0].content) }}",
    "{% for p in (messages[0].content if messages else []) %}{{ p }}{% endfor %}",
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}",
    "{% macro show(x) %}{% if x is not string %}{% for y in x %}{{ y }}{% endfor %}{% endif %}{% endmacro %}"
    "{{ show(messages[0]['content']) }}",
    "{% if messages[0].content is iterable and messages[0].content is not mapping %}"
    "{% for part in messages[0].content %}{{ part }}{% endfor %}{% endif %}",
)


@pytest.mark.parametrize(
    ("source", "taken"),
    [
        *((source, ContentFormat.STRING) for source in TEXTS),
        *((source, ContentFormat.OPENAI) for source in PARTS),
        *((source, ContentFormat.EITHER) for source in EITHER),
    ],
)
def test_the_templates_source_decides_the_content_format(source: str, taken: ContentFormat) -> None:
    assert expected_content_format(environment().parse(source)) is taken
