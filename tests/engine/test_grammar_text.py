"""EBNF and Python's regexes in llguidance's form: the same texts as Python's own regex library accepts."""

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some
from tokenizers import Tokenizer

from engine.grammar.ebnf import ebnf_to_lark
from engine.grammar.limits import GrammarLimits
from engine.grammar.matcher import CompiledGrammar
from engine.grammar.regex import to_rust
from engine.grammar.repetitions import check_repetitions
from tests.engine.grammar_tools import accepts, compiled, tokenizer_of
from tests.engine.tiny_models import save_tiny_tokenizer
from wire.errors import InvalidGrammar
from wire.types import StructuredOutput

_LIMITS = GrammarLimits()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tiny tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(path)
    return path


@pytest.mark.parametrize(
    ("grammar", "regex", "texts"),
    [
        ('root ::= "a"\n  | "b" # c | "d"\n', "a|b", ["a", "b", "ab", "d", ""]),
        ('root ::= "ab" | "a" "bc"', "ab|abc", ["ab", "abc", "a", "abbc"]),
        ('root ::= [a-z]+ "x"', "[a-z]+x", ["abx", "xx", "x", "ab"]),
        (r'root ::= [^"\\\n] [\]a-] [-x]{2}', r'[^"\\\n][\]a-][-x]{2}', ["qa--", "q]xx", "q--x", '"a--', "q^xx"]),
        ('root ::= "\\u0041\\x42\\n" A-b\nA-b ::= . A_b?\nA_b ::= "é" ""', "AB\n(?s:.)é?", ["AB\nz", "AB\nzé", "AB\n"]),
        ("root ::= [a-zA-Z_/]{1,3} \"'\" [0-9]{2,}", "[a-zA-Z_/]{1,3}'[0-9]{2,}", ["a/'00", "b'1", "abcd'11"]),
        ('root ::= ""', "", ["", "a"]),
        ('root ::= | "a" ("b" | "c")*', "|a[bc]*", ["", "a", "abcb", "b"]),
        ("root ::= [\\u4e00-\\u9fff]+", "[\\u4e00-\\u9fff]+", ["你好", "a"]),
        ('root ::= x\nx ::= "1"\nx ::= "2"', "1|2", ["1", "2", "12"]),
        ('root ::= "[" ws root? "]" ws\nws ::= ([ \\n] ws)?', "(\\[ *)(\\] *)", ["[]", "[  ]  ", "[ ", "  []"]),
        ('root ::= "x" w "y"\nw ::= ("a" | "b" w)?', "x(b*a|b*)y", ["xy", "xay", "xbbay", "xbby", "xaby"]),
        ('root ::= "a" root "a" | "b"', "b|aba|aabaa", ["b", "aba", "aabaa", "aab"]),
    ],
)  # fmt: skip
def test_ebnf_accepts_its_language(folder: Path, grammar: str, regex: str, texts: list[str]) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made = compiled(tokenizer_of(folder), StructuredOutput("grammar", grammar))

    assert [accepts(made, tokenizer, text) for text in texts] == [bool(re.fullmatch(regex, text)) for text in texts]


def test_spaces_written_as_a_recursion_become_a_terminal() -> None:
    """Otherwise each space is a level of the parser, and SmolLM2's long runs of them exceed its limit of items."""
    lark = ebnf_to_lark('root ::= "[" ws root? "]"\nws ::= ([ \\t\\n] ws)?', _LIMITS)

    assert lark.splitlines()[2].startswith("R1: ")
    assert "r1" not in lark


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('x ::= "a"', "no rule is named root; the rules are x"),
        ('root ::= "a"\n  y', "line 2: rule 'y' is not defined"),
        ('"b"\nroot ::= "a"', "line 1: a rule must begin with"),
        ('root ::= "a"\n\n%', "line 3: '%' cannot be read"),
        ('root ::= "a"{2,1}', r"\{2,1\}: the lower bound is above the upper"),
        ('root ::= "a"{0,2147483647}', "2147483647 repetitions, but the limit is 100000"),
        ("root ::= " + "(" * 10_000, "nested 10000 deep, but the limit is 64"),
        (r'root ::= "\q"', r"\\q is not an escape"),
        (r'root ::= "\ud800"', r"\\ud800 is not a character"),
    ],
)
def test_wrong_ebnf_is_refused_with_its_line(grammar: str, words: str) -> None:
    with pytest.raises(InvalidGrammar, match=words):
        ebnf_to_lark(grammar, _LIMITS)


def test_a_grammar_of_neither_notation_gets_both_errors(folder: Path) -> None:
    with pytest.raises(InvalidGrammar, match=r"(?s)neither Lark nor EBNF: as Lark: .*as EBNF: no rule is named root"):
        compiled(tokenizer_of(folder), StructuredOutput("grammar", "blah"))


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"\d\D\w\W\s\S", ["1a_- x", "1a_- \x1c", "٣a_- x", "1aé- x", "1a_² x", "1a_é x"]),
        (r"a{,2}[{,3}]", ["aa{", "aaa{", ",", "3", "{"]),
        (r"[\w-]+\\d", ["a-b\\d", "-\\d", "é\\d", "a\\1"]),
        (r"^(?P<x>a|b)[^\d]$", ["ax", "b1", "bé"]),
        (r"a.b", ["axb", "a\nb", "aéb"]),
    ],
)
def test_texts_a_regex_accepts_are_matched_by_python(folder: Path, pattern: str, texts: list[str]) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made = compiled(tokenizer_of(folder), StructuredOutput("regex", pattern))

    taken = {text for text in texts if accepts(made, tokenizer, text)}

    assert taken == {text for text in texts if re.fullmatch(pattern, text) and re.fullmatch(pattern, text, re.ASCII)}


def test_only_classes_and_upper_bounds_of_a_regex_change() -> None:
    assert to_rust(r"\\d [^\]\s]{,3}\{,3} {,4}") == r"\\d [^\][ \t\n\r\x0b\x0c]]{0,3}\{,3} {0,4}"


@pytest.mark.parametrize("text", ["a{0,2147483647}", "a{100001}", "a{100001,}", "a{,99999999999999999999}"])
def test_many_repetitions_are_refused(text: str) -> None:
    with pytest.raises(InvalidGrammar, match="repetitions, but the limit is 100000"):
        check_repetitions(text, _LIMITS)


@given(some.text(max_size=200))
def test_no_text_breaks_the_ebnf_reader(text: str) -> None:
    with contextlib.suppress(InvalidGrammar):
        assert ebnf_to_lark("root ::= " + text, _LIMITS).startswith("start: ")


def test_a_compiled_grammar_can_be_used_many_times(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made = compiled(tokenizer_of(folder), StructuredOutput("regex", "a|bc"))

    assert isinstance(made, CompiledGrammar)
    assert [accepts(made, tokenizer, text) for text in ("a", "bc", "a", "c")] == [True, True, True, False]
