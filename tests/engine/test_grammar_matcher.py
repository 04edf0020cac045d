"""The finish, padding, resumption and limits of a sequence's matcher."""

import json
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from engine.grammar.interface import Matcher
from engine.grammar.limits import GrammarLimits, StepLimits
from engine.grammar.llguidance_backend import LlguidanceBackend
from engine.grammar.matcher import CompiledGrammar
from engine.grammar.source import GrammarKind
from engine.grammar.tokenizer_file import TokenizerFile
from tests.engine.grammar_tools import EOS_ID, PADDED, allowed_ids, compiled, tokenizer_of
from tests.engine.tiny_models import VOCAB_SIZE, save_tiny_tokenizer
from wire.errors import InvalidGrammar
from wire.types import StructuredOutput


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tiny tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(path)
    return path


def _matcher(folder: Path, regex: str, stops: tuple[int, ...] = (EOS_ID,)) -> Matcher:
    return compiled(tokenizer_of(folder), StructuredOutput("regex", regex)).matcher(stops)


def _ids(folder: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def test_the_end_is_allowed_exactly_where_the_text_is_complete(folder: Path) -> None:
    matcher = _matcher(folder, "ab?")
    a, b = _ids(folder, "a")[0], _ids(folder, "b")[0]

    assert EOS_ID not in allowed_ids(matcher)
    assert not matcher.advance(EOS_ID)
    assert matcher.advance(a)
    assert allowed_ids(matcher) == {b, EOS_ID}
    assert not matcher.finished
    assert matcher.advance(b)
    assert allowed_ids(matcher) == {EOS_ID}
    assert matcher.finished


def test_a_refused_token_changes_nothing(folder: Path) -> None:
    matcher = _matcher(folder, "ab")
    a, b = _ids(folder, "a")[0], _ids(folder, "b")[0]

    assert not matcher.advance(b)
    assert not matcher.advance(PADDED - 1)
    assert not matcher.advance(10**9)
    assert matcher.advance(a)
    assert b in allowed_ids(matcher)


def test_after_the_end_only_ends_follow(folder: Path) -> None:
    """A request that ignores the end of sequence runs on to its length."""
    matcher = _matcher(folder, "a*", stops=())

    assert matcher.advance(EOS_ID)
    assert allowed_ids(matcher) == {EOS_ID}
    assert matcher.advance(EOS_ID)
    assert not matcher.advance(_ids(folder, "a")[0])
    assert matcher.finished


def test_a_stop_id_that_is_text_is_allowed_where_either_is(folder: Path) -> None:
    a, b, c = (_ids(folder, char)[0] for char in "abc")
    matcher = _matcher(folder, "ab", stops=(EOS_ID, b, c))

    assert allowed_ids(matcher) == {a}
    assert matcher.advance(a)
    assert allowed_ids(matcher) == {b}
    assert matcher.advance(b)
    assert allowed_ids(matcher) == {EOS_ID, b, c}


def test_every_end_of_the_model_ends(folder: Path) -> None:
    tokenizer = tokenizer_of(folder, eos=(EOS_ID, 0, 10**6))
    matcher = compiled(tokenizer, StructuredOutput("choice", '["a"]')).matcher()

    assert matcher.advance(_ids(folder, "a")[0])
    assert allowed_ids(matcher) == {0, EOS_ID}


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 7, VOCAB_SIZE, VOCAB_SIZE + 1, 2 * VOCAB_SIZE])
def test_ids_beyond_model_or_tokenizer_are_never_allowed(folder: Path, vocab_size: int) -> None:
    tokenizer = tokenizer_of(folder, vocab_size=vocab_size)
    matcher = compiled(tokenizer, StructuredOutput("regex", "[a-z \\d\\D]*")).matcher()

    allowed = allowed_ids(matcher, vocab_size)

    assert max(allowed) == min(vocab_size, VOCAB_SIZE) - 1
    assert {0, 1} & allowed == set()


def test_a_character_of_many_tokens_is_complete_or_absent(folder: Path) -> None:
    matcher = _matcher(folder, "日|é")
    ids = _ids(folder, "日")
    assert len(ids) == 3

    for token_id in ids:
        assert EOS_ID not in allowed_ids(matcher)
        assert matcher.advance(token_id)

    assert allowed_ids(matcher) == {EOS_ID}


def test_a_resumed_sequence_allows_what_the_first_did(folder: Path) -> None:
    option = StructuredOutput("json", '{"enum": [{"a": [1, 2]}, {"a": "é"}]}', whitespace_pattern="")
    grammar = compiled(tokenizer_of(folder), option)
    ids = _ids(folder, '{"a":[1,2]}')

    for length in range(len(ids) + 1):
        first, resumed = grammar.matcher(), grammar.matcher()
        for token_id in ids[:length]:
            assert first.advance(token_id)
        resumed.replay(ids[:length])
        assert allowed_ids(resumed) == allowed_ids(first)


def test_outputs_of_another_grammar_cannot_be_resumed(folder: Path) -> None:
    matcher = _matcher(folder, "ab")
    a, c = _ids(folder, "a")[0], _ids(folder, "c")[0]

    with pytest.raises(InvalidGrammar, match=f"output token 1 is {c}, which the grammar does not allow"):
        matcher.replay([a, c])


def test_a_matcher_past_its_limits_fails_with_a_reason(folder: Path) -> None:
    tokenizer, limits = tokenizer_of(folder), GrammarLimits()
    backend = LlguidanceBackend(tokenizer, limits, StepLimits(grammar_items=400))
    form = f"{GrammarKind.GRAMMAR} " + LLMatcher.grammar_from_lark("start: e\ne: e e e | e e | /[a-z]/")
    matcher = CompiledGrammar(backend.build(form), tokenizer, GrammarKind.GRAMMAR, 0).matcher()
    a = _ids(folder, "a")[0]

    def run() -> None:
        for _ in range(200):
            allowed_ids(matcher)
            assert matcher.advance(a)

    with pytest.raises(InvalidGrammar, match=r"Too many items"):
        run()


def test_a_tokenizer_other_than_byte_level_bpe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(
        '{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}}'
    )

    with pytest.raises(InvalidGrammar, match="not possible with this model's tokenizer"):
        compiled(TokenizerFile(str(path), (0,), 3), StructuredOutput("regex", "a"))
    with pytest.raises(InvalidGrammar, match=r"needs the model's tokenizer\.json: No such file") as caught:
        compiled(TokenizerFile(str(tmp_path / "none"), (0,), 3), StructuredOutput("regex", "a"))
    assert str(tmp_path) not in str(caught.value)


def test_a_row_is_completely_overwritten(folder: Path) -> None:
    """Old bits of a reused row are cleared."""
    matcher = _matcher(folder, "a")
    row = np.full((PADDED + 31) // 32, -1, dtype=np.int32)

    matcher.fill(row)

    assert int(np.bitwise_count(row.view(np.uint32)).sum()) == 1


def test_the_default_whitespace_is_bounded(folder: Path) -> None:
    matcher = compiled(tokenizer_of(folder), StructuredOutput("json_object", "")).matcher()
    brace, blank = _ids(folder, "{")[0], _ids(folder, " ")[0]
    assert matcher.advance(brace)

    taken = 0
    while matcher.advance(blank):
        taken += 1

    assert 8 <= taken <= 32
    assert json.loads("{" + " " * taken + "}") == {}
