"""Turn EBNF (rules `name ::= ...` from `root`, as GBNF and xgrammar write it) into Lark for llguidance. Pure.

It may contain sequences, `|`, `( )`, `* + ? {n} {n,} {n,m}`, "texts", [classes], `.` and # comments. A rule may span
several lines, until the next `name ::=`.

llguidance splits text into lexemes, each as long as possible. So a rule that is not recursive becomes a single
terminal, which is exact. In recursive rules, a text or class that could extend into what follows matches greedily.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from engine.grammar.limits import GrammarLimits
from engine.grammar.source import nesting
from wire.errors import InvalidGrammar

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
    |(?P<define>[A-Za-z_][A-Za-z0-9_-]*[ \t\r\n]*::=)
    |(?P<name>[A-Za-z_][A-Za-z0-9_-]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*")
    |(?P<klass>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<repeat>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    |(?P<sign>[|()*+?.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "b": "\b", "0": "\0"}
_IN_CLASS = set("\\]^-[&~/")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    position: int


def looks_like_ebnf(text: str) -> bool:
    """Return whether the text defines rules by `::=`."""
    return "::=" in text


def ebnf_to_lark(text: str, limits: GrammarLimits) -> str:
    """Return the same grammar in Lark, with the start rule `start`. Raises InvalidGrammar with the line."""
    depth = nesting(text, "(", ")")
    if depth > limits.nesting:
        raise InvalidGrammar(f"groups are nested {depth} deep, but the limit is {limits.nesting}")
    tokens = list(_tokens(text))
    defined = {_defined_name(token) for token in tokens if token.kind == "define"}
    if "root" not in defined:
        raise InvalidGrammar(f"no rule is named root; the rules are {', '.join(sorted(defined)[:10]) or 'none'}")
    bodies = _rule_bodies(tokens, text)
    names = _lark_names(bodies)
    lines = [f"start: {names['root']}"]
    for name, body in bodies.items():
        lines.append(f"{names[name]}: {' '.join(_write_part(token, text, names, limits) for token in body)}")
    return "\n".join(lines) + "\n"


def _rule_bodies(tokens: list[_Token], text: str) -> dict[str, list[_Token]]:
    """Return each rule's tokens; a rule defined twice has both bodies as alternatives."""
    bodies: dict[str, list[_Token]] = {}
    body: list[_Token] | None = None
    for token in tokens:
        if token.kind == "define":
            body = bodies.setdefault(_defined_name(token), [])
            if body:
                body.append(_Token("sign", "|", token.position))
        elif body is None:
            raise _invalid(token.position, text, "a rule must begin with `name ::=`")
        else:
            body.append(token)
    return {name: _looped(name, body) for name, body in bodies.items()}


def _looped(name: str, body: list[_Token]) -> list[_Token]:
    """Return `(a)*` for `(a name)?`, common for spaces in GBNF: a recursion would add a parser level per character."""
    texts = [token.text for token in body]
    inner = texts[1:-3]
    is_tail = texts[:1] == ["("] and texts[-3:] == [name, ")", "?"]
    if not is_tail or not inner or {"(", ")", "|", name} & set(inner):
        return body
    return [*body[:-3], body[-2], _Token("sign", "*", body[-1].position)]


def _lark_names(bodies: dict[str, list[_Token]]) -> dict[str, str]:
    """Return each rule's name in Lark: in upper case, as a terminal, if the rule uses no recursive rule."""
    uses = {name: {token.text for token in body if token.kind == "name"} for name, body in bodies.items()}
    terminals: set[str] = set()
    while found := {name for name in uses.keys() - terminals if uses[name] <= terminals}:
        terminals |= found
    numbered = {name: f"r{index}" for index, name in enumerate(bodies)}
    return {name: lark.upper() if name in terminals else lark for name, lark in numbered.items()}


def _tokens(text: str) -> Iterator[_Token]:
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise _invalid(position, text, f"{text[position : position + 20]!r} cannot be read")
        if found.lastgroup != "space":
            yield _Token(str(found.lastgroup), found.group(), position)
        position = found.end()


def _write_part(token: _Token, text: str, names: dict[str, str], limits: GrammarLimits) -> str:
    if token.kind == "name":
        if token.text not in names:
            raise _invalid(token.position, text, f"rule {token.text!r} is not defined")
        return names[token.text]
    if token.kind == "text":
        return json.dumps("".join(_unescape_text(token.text[1:-1], token, text)), ensure_ascii=False)
    if token.kind == "klass":
        return _character_class(token, text)
    if token.kind == "repeat":
        return _write_repetition(token, text, limits)
    return r"/(?s:.)/" if token.text == "." else token.text


def _character_class(token: _Token, text: str) -> str:
    inside = token.text[1:-1]
    negated = inside.startswith("^")
    inside = inside[1:] if negated else inside
    if not inside:
        return r"/(?s:.)/" if negated else '""'
    pieces = [found.group() for found in re.finditer(r"\\(?:x..|u....|U.{8}|.)|.", inside, re.DOTALL)]
    written = []
    for index, piece in enumerate(pieces):
        char = next(iter(_unescape_text(piece, token, text)))
        is_range = piece == "-" and 0 < index < len(pieces) - 1
        written.append("-" if is_range else _class_member(char))
    return f"/[{'^' if negated else ''}{''.join(written)}]/"


def _class_member(char: str) -> str:
    if char in _IN_CLASS:
        return "\\" + char
    return char if char.isprintable() else f"\\u{{{ord(char):x}}}"


def _write_repetition(token: _Token, text: str, limits: GrammarLimits) -> str:
    minimum, comma, maximum = token.text[1:-1].replace(" ", "").partition(",")
    for bound in (minimum, maximum):
        if bound and (len(bound) > 9 or int(bound) > limits.repetitions):
            raise _invalid(token.position, text, f"{bound} repetitions, but the limit is {limits.repetitions}")
    if maximum and int(maximum) < int(minimum):
        raise _invalid(token.position, text, f"{token.text}: the lower bound is above the upper")
    return f"{{{int(minimum)}{comma}{maximum}}}"


def _unescape_text(escaped: str, token: _Token, text: str) -> Iterator[str]:
    position = 0
    for found in _ESCAPE.finditer(escaped):
        yield from escaped[position : found.start()]
        yield _unescape(found.group(1), token, text)
        position = found.end()
    yield from escaped[position:]


def _unescape(code: str, token: _Token, text: str) -> str:
    if len(code) == 1:
        if code.isalnum() and code not in _PLAIN:
            raise _invalid(token.position, text, f"\\{code} is not an escape")
        return _PLAIN.get(code, code)
    number = int(code[1:], 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise _invalid(token.position, text, f"\\{code} is not a character")
    return chr(number)


def _defined_name(token: _Token) -> str:
    return token.text.removesuffix("::=").rstrip()


def _invalid(position: int, text: str, message: str) -> InvalidGrammar:
    return InvalidGrammar(f"line {text.count(chr(10), 0, position) + 1}: {message}")
