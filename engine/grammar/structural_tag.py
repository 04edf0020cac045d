"""Turn structural tags (free text in which fixed texts open JSON and other forms) into Lark for llguidance.

The current form is {"format": {"type": ...}}, a tree of the types in `_FIELDS`; the older one is
{"structures": [{"begin": "<f=x>", "schema": {...}, "end": "</f>"}], "triggers": ["<f="]}, read as `triggered_tags`.

llguidance splits text into lexemes, each as long as possible. So free text, or a regex, is one lexeme together with the
fixed text after it: the lexeme ends where that text first occurs.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from engine.grammar.ebnf import ebnf_to_lark
from engine.grammar.limits import GrammarLimits
from engine.grammar.regex import to_rust
from engine.grammar.repetitions import check_repetitions
from wire.errors import InvalidGrammar

_FIELDS = {
    "const_string": ("value",),
    "any_text": ("excludes", "max_chars"),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "token": ("token",),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "star": ("content",),
    "plus": ("content",),
    "repeat": ("content", "min", "max"),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    "dispatch": ("rules", "loop", "excludes"),
}
"""The supported types, each with its fields. Any other field is refused unless it has its default value."""
_DEFAULTS: tuple[object, ...] = (None, False, [], "json")
_ANY, _MORE = r"/(?s:.*)/", r"/(?s:.+)/"
_Texts = tuple[tuple[str, str], ...]
_SPECIAL = re.compile(r"<[^<>\s]+>")


@dataclass(frozen=True, slots=True)
class _After:
    """What follows a format: as Lark, and the fixed texts that it may begin with, each with the Lark after that text.

    `last` is the Lark after free text that no fixed text ends, None where a fixed text must end the free text.
    """

    lark: str = ""
    texts: _Texts = ()
    last: str | None = None


_END = _After(last="")
_REPEATED = _After()


def tags_to_lark(text: str, json_options: Mapping[str, Any], limits: GrammarLimits) -> str:
    """Return a Lark grammar of the tags. `json_options` are llguidance's for a schema. Raises InvalidGrammar."""
    tag = json.loads(text)
    return _Writer(json_options, limits).grammar(tag["format"] if "format" in tag else _triggered_tags(tag))


def _triggered_tags(tag: dict[str, Any]) -> dict[str, Any]:
    """Return the older form as a format."""
    structures = tag.get("structures")
    if not isinstance(structures, list) or not structures or not _are_texts(tag.get("triggers")):
        raise InvalidGrammar("a structural tag needs a format, or the lists structures and triggers")
    tags = []
    for structure in structures:
        if not isinstance(structure, dict) or not _are_texts([structure.get("begin"), structure.get("end")]):
            raise InvalidGrammar("each structure needs the texts begin and end, and a schema")
        schema = {"type": "json_schema", "json_schema": structure.get("schema", {})}
        tags.append({"type": "tag", "begin": structure["begin"], "content": schema, "end": structure["end"]})
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


class _Writer:
    """Writes the rules of one grammar. Each method for a type returns Lark for the format and for what follows it."""

    def __init__(self, json_options: Mapping[str, Any], limits: GrammarLimits) -> None:
        self._json_options, self._limits = json_options, limits
        self._rules: list[str] = []

    def grammar(self, form: object) -> str:
        """Return the grammar of a whole text of this format."""
        start = self._write(form, _END)
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _add_rule(self, lark: str, option: str = "", *, letter: str = "r") -> str:
        name = f"{letter}{len(self._rules)}"
        self._rules.append(f"{name}{option}: {lark}")
        return name

    def _add_terminal(self, lark: str) -> str:
        return self._add_rule(lark, letter="T")

    def _write(self, form: object, after: _After) -> str:
        kind = form.get("type") if isinstance(form, dict) else None
        if not isinstance(form, dict) or not isinstance(kind, str) or kind not in _FIELDS:
            shown = f"has the type {json.dumps(kind)[:40]}" if isinstance(form, dict) else f"is {json.dumps(form)[:40]}"
            raise InvalidGrammar(f"a format of a structural tag {shown}; supported types are {', '.join(_FIELDS)}")
        for name in form.keys() - {"type", *_FIELDS[kind]}:
            if form[name] not in _DEFAULTS:
                raise InvalidGrammar(f"{kind} of a structural tag has {name[:40]}, which is not supported")
        return str(getattr(self, f"_write_{kind}")(form, after))

    def _write_const_string(self, form: dict[str, Any], after: _After) -> str:
        return f"{_quote(_text(form, 'value'))} {after.lark}"

    def _write_any_text(self, form: dict[str, Any], after: _After) -> str:
        maximum = form.get("max_chars")
        pattern = _ANY if maximum is None else f"/(?s:.){{0,{self._count(form, 'max_chars')}}}/"
        return self._free_text(self._excluding(pattern, form), after)

    def _write_json_schema(self, form: dict[str, Any], after: _After) -> str:
        schema = {} if form.get("json_schema") is True else form.get("json_schema")
        if not isinstance(schema, dict):
            raise InvalidGrammar("json_schema of a structural tag must be an object or true")
        return f"{self._add_rule('%json ' + json.dumps({**schema, 'x-guidance': self._json_options}))} {after.lark}"

    def _write_regex(self, form: dict[str, Any], after: _After) -> str:
        pattern = _text(form, "pattern")
        check_repetitions(pattern, self._limits)
        escaped = json.loads(LLMatcher.grammar_from_regex(to_rust(pattern)))["grammars"][0]["lark_grammar"]
        regex = escaped.removeprefix("start: ")
        return self._free_text(regex, after) if after.texts else f"{self._add_rule(regex)} {after.lark}"

    def _write_grammar(self, form: dict[str, Any], after: _After) -> str:
        lark = ebnf_to_lark(_text(form, "grammar"), self._limits)
        return f"{self._add_rule('%lark {' + chr(10) + lark + '}')} {after.lark}"

    def _write_token(self, form: dict[str, Any], after: _After) -> str:
        return f"{_token(form)} {after.lark}"

    def _write_sequence(self, form: dict[str, Any], after: _After) -> str:
        first, *others = _list_field(form, "elements")
        for part in reversed(others):
            after = self._then(part, after)
        return self._write(first, after)

    def _write_or(self, form: dict[str, Any], after: _After) -> str:
        return _alternatives([self._write(part, after) for part in _list_field(form, "elements")])

    def _write_optional(self, form: dict[str, Any], after: _After) -> str:
        return _alternatives([self._write(form.get("content"), after), after.lark])

    def _write_star(self, form: dict[str, Any], after: _After) -> str:
        return self._repeat_content(form, "*", after)

    def _write_plus(self, form: dict[str, Any], after: _After) -> str:
        return self._repeat_content(form, "+", after)

    def _write_repeat(self, form: dict[str, Any], after: _After) -> str:
        minimum = self._count(form, "min")
        if form.get("max") == -1:
            return self._repeat_content(form, f"{{{minimum},}}", after)
        maximum = self._count(form, "max")
        if maximum < minimum:
            raise InvalidGrammar(f"repeat of a structural tag has min {minimum}, above max {maximum}")
        return self._repeat_content(form, f"{{{minimum},{maximum}}}", after)

    def _write_tag(self, form: dict[str, Any], after: _After) -> str:
        begin = form.get("begin")
        first = _quote(_text(form, "begin")) if isinstance(begin, str) else _token(begin)
        return f"{first} {self._content(form, after)}"

    def _write_triggered_tags(self, form: dict[str, Any], after: _After) -> str:
        loop = not form.get("stop_after_first")
        triggers: Any = form.get("triggers")
        if not _are_texts(triggers) or not all(triggers):
            raise InvalidGrammar("triggers of a structural tag must be a list of strings, none of them empty")
        bodies: dict[str, list[str]] = {}
        for tag in _list_field(form, "tags"):
            begin = _text(tag, "begin")
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise InvalidGrammar(f"{begin!r} must begin with one of the triggers {triggers}")
            content = self._content(tag, _REPEATED if loop else after)
            bodies.setdefault(trigger, []).append(f"{_quote(begin[len(trigger) :])} {content}")
        texts = tuple((trigger, self._add_rule(_alternatives(ways))) for trigger, ways in bodies.items())
        pattern = self._excluding(_ANY, form)
        if not form.get("at_least_one"):
            return self._free_text_with_tags(pattern, texts, after, loop=loop)
        first = _alternatives([f"{_quote(trigger)} {body}" for trigger, body in texts])
        return f"{first} {self._free_text_with_tags(pattern, texts, after, loop=True)}" if loop else first

    def _write_tags_with_separator(self, form: dict[str, Any], after: _After) -> str:
        tags, separator = _list_field(form, "tags"), _quote(_text(form, "separator"))
        needs_one = form.get("at_least_one")
        if form.get("stop_after_first"):
            ways = [self._write(tag, after) for tag in tags]
            return _alternatives(ways if needs_one else [*ways, after.lark])
        tag = self._add_rule(_alternatives([self._write(tag, _REPEATED) for tag in tags]))
        return f"({tag} ({separator} {tag})*){'' if needs_one else '?'} {after.lark}"

    def _write_dispatch(self, form: dict[str, Any], after: _After) -> str:
        loop = form.get("loop", True)
        texts = []
        for rule in _list_field(form, "rules"):
            if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str) or not rule[0]:
                raise InvalidGrammar("each of the rules of a structural tag must have a non-empty string and a format")
            texts.append((rule[0], self._add_rule(self._write(rule[1], _REPEATED if loop else after))))
        return self._free_text_with_tags(self._excluding(_ANY, form), tuple(texts), after, loop=loop)

    def _content(self, tag: dict[str, Any], after: _After) -> str:
        """Return a rule for a tag after its begin text, and for what follows the tag."""
        end = tag.get("end")
        if isinstance(end, dict):
            last = self._add_rule(f"{_token(end)} {after.lark}")
            return self._add_rule(self._write(tag.get("content"), _After(last, last=last)))
        ends = [end] if isinstance(end, str) else end
        if not _are_texts(ends) or not ends:
            raise InvalidGrammar("end of a tag must be a string, a list of strings or a token")
        texts = tuple((text, after.lark) for text in ends if text)
        lark = self._add_rule(_alternatives([f"{_quote(text)} {after.lark}" for text in ends]))
        if "" in ends:
            return self._add_rule(self._write(tag.get("content"), _After(lark, texts + after.texts, after.last)))
        return self._add_rule(self._write(tag.get("content"), _After(lark, texts)))

    def _then(self, form: object, after: _After) -> _After:
        """Return what follows the previous format: this format, and everything after it."""
        if not _begins_fixed(form):
            return _After(self._add_rule(self._write(form, after)))
        texts = tuple(self._fixed_texts(form, after))
        return _After(self._add_rule(_alternatives([f"{_quote(text)} {rest}" for text, rest in texts])), texts)

    def _fixed_texts(self, form: Any, after: _After) -> list[tuple[str, str]]:
        if form["type"] == "or":
            return [found for part in form["elements"] for found in self._fixed_texts(part, after)]
        if form["type"] == "const_string":
            return [(form["value"], after.lark)]
        return [(form["begin"], self._content(form, after))]

    def _free_text_with_tags(self, pattern: str, texts: _Texts, after: _After, *, loop: bool) -> str:
        """Return free text in which each of `texts` is followed by its Lark."""
        if not loop:
            return self._free_text(pattern, _After(texts=texts + after.texts, last=after.last))
        stops = texts + after.texts
        return f"{self._free_text(pattern, _After(texts=texts), stops)}* {self._free_text(pattern, after, stops)}"

    def _free_text(self, pattern: str, after: _After, stops: _Texts = ()) -> str:
        """Return text of `pattern` up to one of the texts after it, or to the end; none of `stops` may occur in it.

        A lazy lexeme ends at its first match. But llguidance 1.9 panics if a single byte matches: for a stop of one
        byte, the other lexemes exclude that byte instead.
        """
        bytes_ = " | ".join(_quote(text) for text, _ in stops or after.texts if len(text.encode()) == 1)
        ways = []
        for text, rest in after.texts:
            lark = f"{pattern} {_quote(text)}"
            lark = f"({lark}) & ~({pattern} ({bytes_}) {_MORE})" if bytes_ else lark
            ways.append(
                f"{self._add_rule(self._add_terminal(lark), '' if len(text.encode()) == 1 else '[lazy]')} {rest}"
            )
        if after.last is not None:
            lark = f"{pattern} & ~({pattern} ({bytes_}) {_ANY})" if bytes_ else pattern
            ways.append(f"{self._add_terminal(lark)} {after.last}")
        if not ways:
            raise InvalidGrammar("free text within a structural tag must be followed by a fixed text")
        return _alternatives(ways)

    def _excluding(self, pattern: str, form: dict[str, Any]) -> str:
        excludes = form.get("excludes") or []
        if not _are_texts(excludes) or not all(excludes):
            raise InvalidGrammar("excludes of a structural tag must be a list of strings, none of them empty")
        if not excludes:
            return pattern
        texts = " | ".join(_quote(text) for text in excludes)
        return self._add_terminal(f"{pattern} & ~({_ANY} ({texts}) {_ANY})")

    def _repeat_content(self, form: dict[str, Any], times: str, after: _After) -> str:
        return f"{self._add_rule(self._write(form.get('content'), _REPEATED))}{times} {after.lark}"

    def _count(self, form: dict[str, Any], name: str) -> int:
        value = form.get(name)
        if type(value) is not int or not 0 <= value <= self._limits.repetitions:
            raise InvalidGrammar(
                f"{name} of a structural tag is {str(value)[:20]}, but must be 0 to {self._limits.repetitions}"
            )
        return value


def _begins_fixed(form: object) -> bool:
    if not isinstance(form, dict):
        return False
    if form.get("type") == "or":
        return all(_begins_fixed(part) for part in _list_field(form, "elements"))
    name = {"const_string": "value", "tag": "begin"}.get(str(form.get("type")), "")
    return isinstance(form.get(name), str) and form[name] != ""


def _list_field(form: dict[str, Any], name: str) -> list[Any]:
    value = form.get(name)
    if not isinstance(value, list) or not value:
        raise InvalidGrammar(f"{name} of a structural tag must be a non-empty list")
    return value


def _text(form: object, name: str) -> str:
    value = form.get(name) if isinstance(form, dict) else None
    if not isinstance(value, str):
        raise InvalidGrammar(f"{name} of a structural tag must be a string")
    return value


def _token(form: object) -> str:
    token = form.get("token") if isinstance(form, dict) else None
    if type(token) is int:
        return f"<[{token}]>"
    if isinstance(token, str) and _SPECIAL.fullmatch(token):
        return token
    raise InvalidGrammar("a token of a structural tag must be an id, or the name of a special token, such as <|name|>")


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _alternatives(ways: Sequence[str]) -> str:
    return "(" + " | ".join(way if way.strip() else '""' for way in ways) + ")"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
