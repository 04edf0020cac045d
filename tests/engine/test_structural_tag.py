"""The texts that structural tags allow: those of xgrammar 0.2.8, except for many blanks and text after an end."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.grammar.limits import GrammarLimits
from tests.engine.grammar_tools import EOS_ID, allowed_ids, compiled, tokenizer_of
from tests.engine.tiny_models import save_tiny_tokenizer
from wire.errors import InvalidGrammar, appearance
from wire.types import StructuredOutput

_ANY: dict[str, Any] = {"type": "any_text"}
_NUMBER = {"type": "json_schema", "json_schema": {"enum": [1, 2]}}
_OBJECT = {
    "type": "json_schema",
    "json_schema": {"properties": {"q": {"enum": ["x"]}}, "required": ["q"], "additionalProperties": False},
}


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def _all(*elements: object) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements}


def _one(*elements: object) -> dict[str, Any]:
    return {"type": "or", "elements": elements}


def _times(kind: str, content: object, **more: int) -> dict[str, Any]:
    return {"type": kind, "content": content, **more}


def _tag(begin: object, content: object, end: object) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _triggered(*tags: object, **more: object) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": tags, **more}


def _separated(*tags: object, separator: str = ",", **more: object) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": tags, "separator": separator, **more}


def _dispatch(*rules: tuple[str, object], **more: object) -> dict[str, Any]:
    return {"type": "dispatch", "rules": rules, **more}


_X, _Y = _tag("<f=x>", _NUMBER, "</f>"), _tag("<f=y>", _text("q"), "</f>")
_A = _tag("<a>", _NUMBER, "</a>")
_EBNF = {"type": "grammar", "grammar": 'root ::= "a" root "b" | "c"'}
_ROWS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (_text("ab"), ["ab"], ["", "a", "abc"]),
    (_text(""), [""], ["a"]),
    (_ANY, ["", "abc é日\n"], []),
    ({**_ANY, "excludes": ["bc"]}, ["ab", "abxc"], ["abc"]),
    ({**_ANY, "max_chars": 2}, ["", "é日"], ["abc"]),
    (_OBJECT, ['{"q":"x"}', '{ "q" : "x" }'], ['{"q":"y"}', "{}", "{" + " " * 50 + '"q":"x"}']),
    ({"type": "json_schema", "json_schema": True}, ["1", '{"a":[]}'], ["x"]),
    (_regex("[a-c]+"), ["abc"], ["", "x"]),
    (_all(_regex("[a-c]+"), _text("c!")), ["abcc!", "ac!"], ["c!", "abc"]),
    (_all(_regex(r"\(\w+\)"), _text(")")), ["(a))"], ["(a)"]),
    (_EBNF, ["c", "aacbb"], ["ab", "acbb"]),
    (_tag("<a>", _EBNF, "</a>"), ["<a>acb</a>"], ["<a>ab</a>"]),
    (_A, ["<a>1</a>"], ["<a>3</a>", "<a>1", "1"]),
    (_tag("<a>", _ANY, "</a>"), ["<a>x</a>", "<a>é<</a</a>"], ["<a>x</a>y", "<a></a></a>"]),
    (_tag("<a>", _ANY, ["</a>", "."]), ["<a>x.", "<a>x</a>"], ["<a>x.y"]),
    (_tag("<a>", _NUMBER, ["</a>", ""]), ["<a>1", "<a>1</a>"], ["<a>"]),
    (_tag("<a>", _all(_text("x"), _ANY), "</a>"), ["<a>xab</a>"], ["<a></a>", "<a>x</a>."]),
    (_tag("<a>", _one(_text("x"), _ANY), "</a>"), ["<a>x</a>", "<a>ab</a>"], ["<a>ab"]),
    (_tag("<a>", _regex("(.|\n)*"), "</a>"), ["<a>x\ny</a>"], ["<a>x</a>y"]),
    (_tag("b", _tag("bb", _ANY, "b"), "bb>"), ["bbbxbbb>", "bbbbbb>"], ["bbbxbxbb>"]),
    (_all(_ANY, _text("x")), ["x", "abx"], ["ab"]),
    (_all(_ANY, _A), ["ab<a>1</a>", "<a>2</a>"], ["<a>3</a>", "ab"]),
    (_all(_ANY, _one(_A, _text("."))), ["ab.", "<a>1</a>"], ["ab", "a.b"]),
    (_one(_text("x"), _ANY), ["x", "ab"], []),
    (_all(_times("optional", _ANY), _text("b")), ["b", "ab"], ["a"]),
    (_times("plus", _text("a")), ["a", "aaa"], ["", "b"]),
    (_times("star", _text("a")), ["", "aaa"], ["b"]),
    (_times("repeat", _text("a"), min=1, max=2), ["a", "aa"], ["", "aaa"]),
    (_times("repeat", _text("a"), min=1, max=-1), ["a", "aaa"], [""]),
    (_triggered(_X, _Y), ["", "a<f", "a<f=x>1</f>b<f=y>q</f>"], ["a<f=", "<f=z>", "<f=x>3"]),
    (_triggered(_X, stop_after_first=True), ["free", "a<f=x>1</f>"], ["a<f=x>1</f>b"]),
    (_triggered(_X, at_least_one=True), ["<f=x>1</f>", "<f=x>1</f>b<f=x>2</f>"], ["", "a<f=x>1</f>"]),
    (_triggered(_X, at_least_one=True, stop_after_first=True), ["<f=x>1</f>"], ["", "<f=x>1</f>b"]),
    (_triggered(_X, excludes=["zz"]), ["az<f=x>1</f>z"], ["zz", "z<f=x>1</f>zz"]),
    (_triggered(_tag("<f=x>", _NUMBER, "")), ["a<f=x>1b", "<f=x>1<f=x>2"], ["<f=x>"]),
    (_tag("<t>", _triggered(_X), "</t>"), ["<t></t>", "<t>a<f=x>1</f>z</t>"], ["<t></t>a", "<t>a<f=</t>"]),
    (_tag("<t>", _triggered(_X), "\n"), ["<t>\n", "<t>a<f=x>1</f>z\n"], ["<t>\na", "<t><f=\n"]),
    (_tag("<t>", _triggered(_X, stop_after_first=True), "!"), ["<t>b!", "<t>a<f=x>1</f>!"], ["<t>a<f=x>1</f>z!"]),
    (_separated(_A), ["", "<a>1</a>", "<a>1</a>,<a>2</a>"], [",", "<a>1</a>,"]),
    (_separated(_A, _tag("<b>", _ANY, "</b>")), ["<a>1</a>,<b>x,</b>"], ["<b>,"]),
    (_separated(_A, separator=""), ["<a>1</a><a>1</a>"], ["<a>1</a>,"]),
    (_separated(_A, at_least_one=True), ["<a>1</a>", "<a>1</a>,<a>1</a>"], [""]),
    (_separated(_A, stop_after_first=True), ["", "<a>1</a>"], ["<a>1</a>,<a>1</a>"]),
    (_tag("<t>", _separated(_A), "</t>"), ["<t></t>", "<t><a>1</a>,<a>1</a></t>"], ["<t>,</t>"]),
    (_dispatch(("<f>", _NUMBER), ("<g>", _text("q"))), ["ab", "a<f>1b<g>q"], ["<f>z", "<g>"]),
    (_dispatch(("<f>", _NUMBER), loop=False), ["ab", "a<f>1"], ["a<f>1b", "a<f>"]),
    (_dispatch(("<f>", _NUMBER), excludes=["z"]), ["ab", "<f>1b"], ["az", "z<f>1", "<f>1z"]),
    (_tag("<t>", _dispatch(("<f>", _NUMBER)), "z"), ["<t>abz", "<t>a<f>1bz"], ["<t>ab", "<t>zz"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tiny tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(path)
    return path


def _allows(folder: Path, tag: object, *pieces: str | int) -> bool:
    """Return whether the ids of these bytes, and ids as they are, may follow one another, and then the end."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    matcher = compiled(tokenizer_of(folder), StructuredOutput("structural_tag", json.dumps(tag))).matcher()
    for piece in pieces:
        ids = [piece] if isinstance(piece, int) else [_byte_id(tokenizer, byte) for byte in piece.encode()]
        for token_id in ids:
            allowed_ids(matcher)
            if not matcher.advance(token_id):
                return False
    return EOS_ID in allowed_ids(matcher)


def _byte_id(tokenizer: Tokenizer, byte: int) -> int:
    """Return the id of a single byte, which byte-level BPE writes as a printable character."""
    shown = tokenizer.pre_tokenizer.pre_tokenize_str(chr(byte)) if byte < 128 else []
    text = shown[0][0] if shown else _HIGH[byte]
    token_id = tokenizer.token_to_id(text)
    assert token_id is not None
    return token_id


_HIGH = {byte: chr(byte) for byte in range(0xA1, 0x100) if byte != 0xAD} | {
    byte: chr(0x100 + 33 + index) for index, byte in enumerate(range(0x7F, 0xA1))
}


@pytest.mark.parametrize(("form", "allowed", "refused"), _ROWS, ids=[json.dumps(row[0])[:60] for row in _ROWS])
def test_a_format_allows_its_texts_and_no_others(
    folder: Path, form: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    tag = {"type": "structural_tag", "format": form}

    assert [text for text in allowed if not _allows(folder, tag, text)] == []
    assert [text for text in refused if _allows(folder, tag, text)] == []


def test_the_older_form_is_that_of_triggered_tags(folder: Path) -> None:
    tag = {"structures": [{"begin": "<f=x>", "schema": _OBJECT["json_schema"], "end": "</f>"}], "triggers": ["<f="]}

    assert _allows(folder, tag, "free text")
    assert _allows(folder, tag, 'free <f=x>{"q":"x"}</f> more')
    assert not _allows(folder, tag, "free <f=y>")
    assert not _allows(folder, tag, 'free <f=x>{"q":"y"}')


@pytest.mark.parametrize("token", [1, "<|im_start|>"])
def test_a_special_token_can_begin_and_end_a_tag(folder: Path, token: int | str) -> None:
    begin, end = {"type": "token", "token": token}, {"type": "token", "token": 0}
    tag = {"format": _tag(begin, _ANY, end)}

    assert _allows(folder, tag, 1, "ab", 0)
    assert not _allows(folder, tag, 1, "ab")
    assert not _allows(folder, tag, "<|im_start|>ab", 0)


def test_a_whitespace_pattern_holds_within_tags(folder: Path) -> None:
    option = StructuredOutput("structural_tag", json.dumps({"format": _tag("<a>", _OBJECT, "</a>")}), "")
    matcher = compiled(tokenizer_of(folder), option).matcher()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    for byte in b"<a>{":
        assert matcher.advance(_byte_id(tokenizer, byte))
    assert not matcher.advance(_byte_id(tokenizer, ord(" ")))


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ({"structures": []}, "needs a format, or the lists structures and triggers"),
        ({"structures": [{"begin": "<f"}], "triggers": ["<f"]}, "each structure needs the texts begin and end"),
        ({"structures": [{"begin": "<f", "end": "", "schema": 3}], "triggers": ["<f"]}, "must be an object or true"),
        ({"format": "x"}, 'a format of a structural tag is "x"; supported types are const_string, any_text'),
        ({"format": {"value": "x"}}, "has the type null; supported types are"),
        ({"format": {"type": []}}, r"has the type \[\]; supported types are"),
        ({"format": {"type": "any_tokens"}}, 'has the type "any_tokens"; supported types are'),
        ({"format": {**_ANY, "max_tokens": 3}}, "any_text of a structural tag has max_tokens, which is not supported"),
        ({"format": {**_OBJECT, "style": "qwen_xml"}}, "json_schema of a structural tag has style, which is not"),
        ({"format": {**_ANY, "excludes": [""]}}, "excludes of a structural tag must be a list of strings"),
        ({"format": {**_ANY, "max_chars": -1}}, "max_chars of a structural tag is -1, but must be 0 to 100000"),
        ({"format": {"type": "json_schema", "json_schema": False}}, "must be an object or true"),
        ({"format": _all()}, "elements of a structural tag must be a non-empty list"),
        ({"format": _all(_ANY, _NUMBER)}, "free text within a structural tag must be followed by a fixed text"),
        ({"format": _times("star", _ANY)}, "free text within a structural tag must be followed by a fixed text"),
        ({"format": _times("repeat", _NUMBER, min=3, max=2)}, "repeat of a structural tag has min 3, above max 2"),
        ({"format": _regex("a{100001}")}, "100001 repetitions, but the limit is 100000"),
        ({"format": _tag("<a>", _ANY, [])}, "end of a tag must be a string, a list of strings or a token"),
        ({"format": _tag({"token": "a"}, _ANY, "b")}, "must be an id, or the name of a special token"),
        ({"format": _triggered(_A)}, r"'<a>' must begin with one of the triggers \['<f='\]"),
        ({"format": _dispatch(("", _ANY))}, "each of the rules of a structural tag must have a non-empty string"),
        ({"format": {"type": "grammar", "grammar": "a ::= b"}}, "no rule is named root"),
    ],
)
def test_unsupported_keys_are_refused_by_name(folder: Path, tag: object, words: str) -> None:
    with pytest.raises(InvalidGrammar, match=words) as caught:
        compiled(tokenizer_of(folder), StructuredOutput("structural_tag", json.dumps(tag)))

    assert appearance(caught.value).http_status == 400


def test_many_nested_alternatives_take_no_more_than_their_text(folder: Path) -> None:
    form: dict[str, Any] = _ANY
    for depth in range(GrammarLimits().nesting // 3 - 2):
        form = _tag(f"<{depth}>", _one(_text("x"), form), [f"</{depth}>", f"</{depth}!>"])

    assert _allows(folder, {"format": form}, "<18>x</18>")
