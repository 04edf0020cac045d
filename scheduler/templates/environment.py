"""The jinja environment of chat templates: sandboxed, with the names that transformers provides."""

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that chat templates expect."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    made.globals["namespace"] = PlainNamespace
    made.globals["dict"] = DictMaker()
    return made


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is only printed."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Scope:
        """Return the body unchanged in its own scope, which limits names set there."""
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class PlainNamespace(Namespace):
    """A namespace for a template's own values; it refuses names with a leading underscore, which are Python's."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as in jinja, so that `self` can be a name
        for name in dict(*args[1:], **kwargs):
            _refuse_private(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class DictMaker:
    """The `dict(…)` of templates: creates dicts without exposing the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, names: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """Return a dict with these keys."""
        return dict.fromkeys(names, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r} begins with an underscore, which a namespace does not allow")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
