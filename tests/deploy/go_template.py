"""Run templates of Go's text/template, as far as the chart uses them: a subset, held to Go's own by a `long` test.

    text {{ pipeline }} {{- trims -}} {{/* comment */}} {{ define "x" }}..{{ end }} {{ include "x" . }}
    {{ if p }}..{{ else if p }}..{{ else }}..{{ end }}  {{ with p }}..{{ end }}  {{ range $k, $v := p }}..{{ end }}
    {{ $x := p }}  .field.field  $x.field  (p)  "text"  12  f a b | g c

It is stricter than Go: a key that a map does not have is an error, so a typo in a name is found.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_ACTION = re.compile(r"(?P<before>\s*\{\{-(?=\s)|\{\{)(?P<body>.*?)(?P<after>(?<=\s)-\}\}\s*|\}\})", re.DOTALL)
_TOKEN = re.compile(
    r'\s*(?:(?P<string>"(?:[^"\\]|\\.)*"|`[^`]*`)|(?P<number>-?[0-9]+)|(?P<assign>:=)|(?P<punct>[()|,])'
    r"|(?P<path>\$?[A-Za-z_0-9]*(?:\.[A-Za-z_0-9]+)+|\$[A-Za-z_0-9]*|\.)|(?P<word>[A-Za-z_][A-Za-z_0-9]*))"
)
Function = Callable[..., Any]


class TemplateError(Exception):
    """A template is invalid, or uses a missing value."""


@dataclass(slots=True)
class Node:
    """One piece of a template: text, an action, or a block with its branches."""

    kind: str
    words: list[tuple[str, str]] = field(default_factory=list)
    text: str = ""
    body: list["Node"] = field(default_factory=list)
    otherwise: list["Node"] = field(default_factory=list)


def parse(text: str) -> tuple[list[Node], dict[str, list[Node]]]:
    """Return a template's nodes and what it defines. Raises TemplateError."""
    pieces = list(_pieces(text))
    defined: dict[str, list[Node]] = {}
    nodes, end = _block(pieces, 0, defined)
    if end != len(pieces):
        raise TemplateError("an end without its beginning")
    return nodes, defined


def render(
    nodes: Sequence[Node], dot: Any, defined: Mapping[str, Sequence[Node]], functions: Mapping[str, Function]
) -> str:
    """Return the text of a template for the data `dot`. Raises TemplateError."""
    return _Run(defined, functions).template(nodes, dot)


def truth(value: Any) -> bool:
    """Return whether a value is true for `if`: zero, nil and empty values are not."""
    return bool(value)


def _pieces(text: str) -> Iterator[Node]:
    at = 0
    while match := _ACTION.search(text, at):
        if match.start() > at:
            yield Node("text", text=text[at : match.start()])
        body = match["body"].strip()
        if not body.startswith("/*"):
            words = list(_words(body))
            kind = words[0][1] if words and words[0][1] in ("if", "else", "end", "range", "with", "define") else "print"
            yield Node(kind, words if kind == "print" else words[1:])
        at = match.end()
    if at < len(text):
        yield Node("text", text=text[at:])


def _words(body: str) -> Iterator[tuple[str, str]]:
    at, body = 0, body.rstrip()
    while at < len(body):
        match = _TOKEN.match(body, at)
        if match is None:
            raise TemplateError(f"what is {body[at : at + 20]!r} in {body!r}?")
        kind = str(match.lastgroup)
        yield kind, match[kind]
        at = match.end()


def _block(pieces: Sequence[Node], at: int, defined: dict[str, list[Node]]) -> tuple[list[Node], int]:
    """Return the nodes up to an `else` or `end`, and where that stands."""
    nodes: list[Node] = []
    while at < len(pieces) and pieces[at].kind not in ("else", "end"):
        node = pieces[at]
        at += 1
        if node.kind in ("if", "with", "range", "define"):
            node.body, at = _block(pieces, at, defined)
            at = _rest(node, pieces, at, defined)
        if node.kind == "define":
            defined[_unquote(node.words[0][1])] = node.body
        else:
            nodes.append(node)
    return nodes, at


def _rest(node: Node, pieces: Sequence[Node], at: int, defined: dict[str, list[Node]]) -> int:
    """Read what follows a block's first branch; return the place after its `end`."""
    if at >= len(pieces):
        raise TemplateError(f"{node.kind} without an end")
    if pieces[at].kind == "end":
        return at + 1
    if pieces[at].words:  # else if ...: a block of its own, which shares the end
        inner = Node("if", pieces[at].words[1:])
        inner.body, at = _block(pieces, at + 1, defined)
        node.otherwise = [inner]
        return _rest(inner, pieces, at, defined)
    node.otherwise, at = _block(pieces, at + 1, defined)
    return at + 1


def _unquote(text: str) -> str:
    return str(json.loads(text)) if text[0] == '"' else text[1:-1]


class _Run:
    """One rendering. Owns nothing; variables are in scopes, each block has one."""

    def __init__(self, defined: Mapping[str, Sequence[Node]], functions: Mapping[str, Function]) -> None:
        self._defined = defined
        self._functions: dict[str, Function] = {**functions, "include": self._include}

    def template(self, nodes: Sequence[Node], dot: Any) -> str:
        return "".join(self._nodes(nodes, dot, {"$": dot}))

    def _include(self, name: str, dot: Any) -> str:
        if name not in self._defined:
            raise TemplateError(f"no template is called {name!r}")
        return self.template(self._defined[name], dot)

    def _nodes(self, nodes: Sequence[Node], dot: Any, scope: dict[str, Any]) -> Iterator[str]:
        for node in nodes:
            match node.kind:
                case "text":
                    yield node.text
                case "print":
                    yield from self._print_node(node, dot, scope)
                case "range":
                    yield from self._run_range(node, dot, scope)
                case kind:
                    value = self._pipeline(node.words, dot, scope)
                    inner = value if kind == "with" and truth(value) else dot
                    branch = node.body if truth(value) else node.otherwise
                    yield from self._nodes(branch, inner, dict(scope))

    def _print_node(self, node: Node, dot: Any, scope: dict[str, Any]) -> Iterator[str]:
        if len(node.words) > 1 and node.words[1][0] == "assign":
            scope[node.words[0][1]] = self._pipeline(node.words[2:], dot, scope)
            return
        value = self._pipeline(node.words, dot, scope)
        yield str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)

    def _run_range(self, node: Node, dot: Any, scope: dict[str, Any]) -> Iterator[str]:
        names: list[str] = []
        words = node.words
        if ("assign", ":=") in words:
            cut = words.index(("assign", ":="))
            names, words = [word for kind, word in words[:cut] if kind == "path"], words[cut + 1 :]
        value = self._pipeline(words, dot, scope)
        pairs = sorted(value.items()) if isinstance(value, Mapping) else list(enumerate(value or ()))
        for key, member in pairs:
            inner = {**scope, **dict(zip(names, (key, member) if len(names) == 2 else (member,), strict=False))}
            yield from self._nodes(node.body, member, inner)

    def _pipeline(self, words: Sequence[tuple[str, str]], dot: Any, scope: Mapping[str, Any]) -> Any:
        value, at = self._command(words, 0, dot, scope, ())
        while at < len(words) and words[at] == ("punct", "|"):
            value, at = self._command(words, at + 1, dot, scope, (value,))
        if at != len(words):
            raise TemplateError(f"too much: {words[at:]}")
        return value

    def _command(
        self, words: Sequence[tuple[str, str]], at: int, dot: Any, scope: Mapping[str, Any], last: tuple[Any, ...]
    ) -> tuple[Any, int]:
        if at >= len(words):
            raise TemplateError("an empty command")
        kind, word = words[at]
        if kind != "word" or word in ("true", "false", "nil"):
            return self._operand(words, at, dot, scope)
        arguments: list[Any] = []
        at += 1
        while at < len(words) and words[at] not in (("punct", "|"), ("punct", ")")):
            value, at = self._operand(words, at, dot, scope)
            arguments.append(value)
        if word not in self._functions:
            raise TemplateError(f"no function is called {word!r}")
        return self._functions[word](*arguments, *last), at

    def _operand(
        self, words: Sequence[tuple[str, str]], at: int, dot: Any, scope: Mapping[str, Any]
    ) -> tuple[Any, int]:
        kind, word = words[at]
        if (kind, word) == ("punct", "("):
            depth, end = 1, at + 1
            while depth:
                depth += {"(": 1, ")": -1}.get(words[end][1] if words[end][0] == "punct" else "", 0)
                end += 1
            return self._pipeline(words[at + 1 : end - 1], dot, scope), end
        if kind == "string":
            return _unquote(word), at + 1
        if kind == "number":
            return int(word), at + 1
        if kind == "path":
            return _path(word, dot, scope), at + 1
        if word in ("true", "false", "nil"):
            return {"true": True, "false": False, "nil": None}[word], at + 1
        if word in self._functions:
            return self._functions[word](), at + 1
        raise TemplateError(f"what is {word!r}?")


def _path(word: str, dot: Any, scope: Mapping[str, Any]) -> Any:
    first, *names = word.split(".")
    if first and first not in scope:
        raise TemplateError(f"no variable is called {first}")
    value = scope[first] if first else dot
    for name in (each for each in names if each):
        if not isinstance(value, Mapping) or name not in value:
            raise TemplateError(f"{word}: there is no {name}")
        value = value[name]
    return value
