"""What a step may cost: exhausted shared lexers, slow steps, and which sequences they end."""

import time
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from engine.grammar.interface import Bits, Matcher
from engine.grammar.limits import GrammarLimits, StepLimits
from engine.grammar.llguidance_backend import LlguidanceBackend
from engine.grammar.llguidance_matcher import LlguidanceGrammar
from engine.grammar.matcher import CompiledGrammar
from engine.grammar.source import GrammarKind, GrammarSource
from engine.grammar.walk import walk
from scheduler.limits import ControlLimits
from tests.engine.grammar_tools import EOS_ID, LIMITS, allowed_ids, tokenizer_of
from tests.engine.tiny_models import save_tiny_tokenizer
from wire.errors import InvalidGrammar


def test_a_thirtieth_of_a_core_is_enough_for_a_compile() -> None:
    limits = GrammarLimits()

    assert limits.compile_s >= 30 * limits.cpu_s
    assert ControlLimits().grammar_s >= limits.wait_s + limits.compile_s


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tiny tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(path)
    return path


def _ids(folder: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def _limited(folder: Path, make_s: float = 0.0) -> CompiledGrammar:
    """Return a grammar whose shared lexer is soon used up; making another takes `make_s` of CPU time at least."""
    tokenizer = LLTokenizer((folder / "tokenizer.json").read_text(), eos_token=EOS_ID)
    limits = LLParserLimits(max_lexer_states=40, verbose_errors=False)

    def make() -> LLMatcher:
        began = time.thread_time()
        while time.thread_time() - began < make_s:
            pass
        return LLMatcher(
            tokenizer, LLMatcher.grammar_from_regex("a[a-z]{0,40}|b[a-z]{0,4}"), log_level=0, limits=limits
        )

    text = LlguidanceGrammar(make, tokenizer, longest_s=0.05)
    return CompiledGrammar(text, tokenizer_of(folder), GrammarKind.REGEX, 0)


def _write(matcher: Matcher, ids: list[int]) -> None:
    for token_id in ids:
        assert token_id in allowed_ids(matcher)
        assert matcher.advance(token_id)


def test_a_sequence_continues_after_another_exhausted_their_lexer(folder: Path) -> None:
    grammar = _limited(folder)
    hungry, modest = grammar.matcher(), grammar.matcher()
    a, b = _ids(folder, "a"), _ids(folder, "b")
    _write(modest, b)

    with pytest.raises(InvalidGrammar, match="too many states"):
        _write(hungry, a * 40)
    _write(modest, b * 4)

    assert modest.finished
    _write(grammar.matcher(), b * 5)


def test_a_slow_lexer_is_not_built_on_the_engine_thread(folder: Path) -> None:
    grammar = _limited(folder, make_s=0.06)
    hungry, modest = grammar.matcher(), grammar.matcher()
    assert not grammar.exhausted

    with pytest.raises(InvalidGrammar, match="too many states"):
        _write(hungry, _ids(folder, "a") * 40)

    assert grammar.exhausted
    with pytest.raises(InvalidGrammar, match="too many states"):
        _write(modest, _ids(folder, "b") * 5)


class _Scripted:
    """A text matcher that takes CPU time at one step, by its own clock."""

    def __init__(self, slow_step: int, seconds: float) -> None:
        self._slow_step, self._seconds, self._steps = slow_step, seconds, 0
        self.accepting = False
        self.now = 0.0

    def thread_time(self) -> float:
        return self.now

    def allowed(self) -> Bits:
        if self._steps == self._slow_step:
            self.now += self._seconds
        return np.full(1, 6, dtype=np.int32)

    def advance(self, token_id: int) -> bool:
        self._steps += 1
        return token_id in (1, 2)


def test_a_grammar_with_a_slow_step_is_found_by_walking_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = _Scripted(20, 0.06), _Scripted(20, 0.05)
    monkeypatch.setattr("engine.grammar.walk.time", slow)
    with pytest.raises(
        InvalidGrammar, match=r"one step of the grammar takes 0\.060 s of CPU time, but the limit is 0\.05 s"
    ):
        walk(slow, GrammarLimits(), GrammarKind.REGEX)

    monkeypatch.setattr("engine.grammar.walk.time", quick)
    walk(quick, GrammarLimits(), GrammarKind.REGEX)


@pytest.mark.parametrize("rules", ["e: e e e | e e | /[a-z]/", "e: e e | /[a-z]/", 'e: "a" e | e "a" | "a"'])
def test_an_ambiguous_grammar_is_refused_before_a_token(folder: Path, rules: str) -> None:
    """With the tiny vocabulary a step makes far fewer items than with a real one, so fewer are allowed here."""
    backend = LlguidanceBackend(tokenizer_of(folder), LIMITS, StepLimits(grammar_items=500))
    with pytest.raises(InvalidGrammar, match="Too many items"):
        backend.compile(GrammarSource(GrammarKind.GRAMMAR, "start: e\n" + rules))

    assert backend.compile(GrammarSource(GrammarKind.GRAMMAR, 'start: e\ne: t | e "+" t\nt: "(" e ")" | /[0-9]+/'))


def test_an_ambiguity_beyond_the_walk_ends_its_sequence(folder: Path) -> None:
    """The walk reads 256 tokens; here the ambiguous part begins after the 300th."""
    backend = LlguidanceBackend(tokenizer_of(folder), GrammarLimits(fill_s=60), StepLimits(grammar_items=500))
    form = backend.compile(GrammarSource(GrammarKind.GRAMMAR, 'start: w{300} e\nw: "w"\ne: e e | /[0-9]/'))
    matcher = CompiledGrammar(backend.build(form), tokenizer_of(folder), GrammarKind.GRAMMAR, 0).matcher()

    with pytest.raises(
        InvalidGrammar,
        match=r"cannot continue after [345]\d\d output tokens: .*limit 500.*; make it unambiguous, or request",
    ):
        _write(matcher, [*_ids(folder, "w") * 300, *_ids(folder, "7") * 500])


def test_a_step_that_takes_too_long_ends_its_own_sequence(folder: Path) -> None:
    tokenizer = LLTokenizer((folder / "tokenizer.json").read_text(), eos_token=EOS_ID)
    form = LLMatcher.grammar_from_regex("[a-z]{3}")
    text = LlguidanceGrammar(lambda: LLMatcher(tokenizer, form, log_level=0), tokenizer, longest_s=1e-9)

    with pytest.raises(InvalidGrammar, match=r"one step .* takes .*; simplify it, or request fewer tokens"):
        allowed_ids(CompiledGrammar(text, tokenizer_of(folder), GrammarKind.REGEX, 0).matcher())
