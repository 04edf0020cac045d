"""The first backend: llguidance, whose steps are bounded by limits of its own."""

import json
import re
import threading
from typing import TYPE_CHECKING

import llguidance
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.grammar.bits import set_bit
from engine.grammar.ebnf import ebnf_to_lark, looks_like_ebnf
from engine.grammar.interface import Bits
from engine.grammar.limits import GrammarLimits, StepLimits
from engine.grammar.regex import to_rust
from engine.grammar.repetitions import check_repetitions
from engine.grammar.source import Kind, Source
from engine.grammar.structural_tag import tags_to_lark
from engine.grammar.tokenizer_file import TokenizerFile
from wire.errors import InvalidGrammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,32}"  # the usual, yet a model that only writes blanks comes to an end
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")
_WORDS = 500


class LlguidanceBackend:
    """Compiles for one tokenizer. Thread-safe once made."""

    def __init__(self, tokenizer: TokenizerFile, limits: GrammarLimits, steps: StepLimits) -> None:
        """Load the tokenizer (0.3 s for 49,152 tokens). Raises InvalidGrammar where llguidance cannot use it."""
        self._limits = limits
        self._tokenizer = _load(tokenizer)
        self._step_limits = llguidance.LLParserLimits(
            max_items_in_row=steps.items_in_row,
            initial_lexer_fuel=steps.initial_lexer_fuel,
            step_lexer_fuel=steps.lexer_fuel,
            step_max_items=steps.items,
            max_lexer_states=steps.lexer_states,
            max_grammar_size=steps.grammar_symbols,
            verbose_errors=False,
        )

    @property
    def num_tokens(self) -> int:
        """Token ids of the tokenizer."""
        return self._tokenizer.vocab_size

    def token_bytes(self) -> list[bytes]:
        """Return each token's bytes; special tokens have none."""
        tokenizer = self._tokenizer
        return [
            b"" if tokenizer.is_special_token(token_id) else tokenizer.decode_bytes([token_id])
            for token_id in range(tokenizer.vocab_size)
        ]

    def compile(self, source: Source) -> str:
        """Return llguidance's own text for `source`, tried as far as its first step. Raises InvalidGrammar."""
        if source.kind is not Kind.GRAMMAR:
            return self._tried(self._form(source))
        lark, ebnf = self._try_lark, self._try_ebnf
        first, second = (ebnf, lark) if looks_like_ebnf(source.text) else (lark, ebnf)
        try:
            return first(source.text)
        except InvalidGrammar as error:
            try:
                return second(source.text)
            except InvalidGrammar as other:
                raise InvalidGrammar(f"the grammar is neither: {error}; {other}") from other

    def build(self, form: str) -> "LlguidanceGrammar":
        """Build what `compile` made. Raises InvalidGrammar."""
        matcher = LLMatcher(self._tokenizer, form, log_level=0, limits=self._step_limits)
        _check(matcher)
        return LlguidanceGrammar(matcher, self._tokenizer)

    def _form(self, source: Source) -> str:
        if source.kind is Kind.REGEX:
            check_repetitions(source.text, self._limits)
            return LLMatcher.grammar_from_regex(to_rust(source.text))
        if source.kind is Kind.CHOICE:
            texts = sorted(set(json.loads(source.text)), key=len)
            return LLMatcher.grammar_from_regex("|".join(_META.sub(r"\\\g<0>", text) for text in texts))
        if source.kind is Kind.STRUCTURAL_TAG:
            return LLMatcher.grammar_from_lark(tags_to_lark(source.text))
        try:
            return LLMatcher.grammar_from_json_schema(source.text, overrides=_json_options(source.whitespace))
        except ValueError as error:
            raise InvalidGrammar(f"the JSON schema cannot be read: {error}") from error

    def _try_lark(self, text: str) -> str:
        check_repetitions(text, self._limits)
        try:
            return self._tried(LLMatcher.grammar_from_lark(text))
        except InvalidGrammar as error:
            raise InvalidGrammar(f"as Lark: {error}") from error

    def _try_ebnf(self, text: str) -> str:
        try:
            return self._tried(LLMatcher.grammar_from_lark(ebnf_to_lark(text, self._limits)))
        except InvalidGrammar as error:
            raise InvalidGrammar(f"as EBNF: {error}") from error

    def _tried(self, form: str) -> str:
        matcher = self.build(form).start()
        if not matcher.allowed().any() and not matcher.accepting:
            raise InvalidGrammar("it allows no text at all")
        return form


class LlguidanceGrammar:
    """A built grammar: the matcher that all others are copied from."""

    def __init__(self, first: LLMatcher, tokenizer: LLTokenizer) -> None:
        self._first, self._tokenizer = first, tokenizer
        self._lock = threading.Lock()  # a matcher may be used by one thread only, to be copied too

    def start(self) -> "LlguidanceMatcher":
        """Return a matcher at the beginning. Any thread."""
        with self._lock:
            return LlguidanceMatcher(self._first.deep_copy(), self._tokenizer)


class LlguidanceMatcher:
    """One sequence's place in the text."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer

    @property
    def accepting(self) -> bool:
        """Whether the text so far is whole."""
        return self._matcher.is_accepting()

    def advance(self, token_id: int) -> bool:
        """Take the text of `token_id`; False, unchanged, if it may not follow. Raises InvalidGrammar at a limit."""
        if token_id >= self._tokenizer.vocab_size or token_id in self._tokenizer.eos_tokens:
            return False
        taken = self._matcher.try_consume_tokens([token_id])
        _check(self._matcher)
        return taken == 1

    def allowed(self) -> Bits:
        """Return which text tokens may follow. Raises InvalidGrammar at a limit."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return np.zeros(0, dtype=np.int32)
        mask = self._matcher.compute_bitmask()
        _check(self._matcher)
        bits = np.frombuffer(mask, dtype=np.int32).copy()
        for token_id in self._tokenizer.eos_tokens:
            set_bit(bits, token_id, allowed=False)
        return bits


def _json_options(whitespace: str | None) -> "JsonCompileOptions":
    return {
        "whitespace_pattern": _WHITESPACE if whitespace is None else whitespace,
        "json_allow_general_unicode_escapes": True,
    }


def _load(tokenizer: TokenizerFile) -> LLTokenizer:
    text = tokenizer.read()
    try:
        found = LLTokenizer(text)
        eos = [token_id for token_id in tokenizer.eos_token_ids if token_id < found.vocab_size]
        return found if not eos or set(eos) == set(found.eos_tokens) else LLTokenizer(text, eos_token=eos)
    except ValueError as error:
        raise InvalidGrammar(f"structured output is not possible with this model's tokenizer: {error}") from error


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise InvalidGrammar(_in_short(matcher.get_error().split("\n<", 1)[0].strip()))


def _in_short(words: str) -> str:
    """A parser repeats what it was given before it says what is wrong with it."""
    if words.startswith("NoExtension"):
        return "no text satisfies it"
    said = re.search(r"^error: .*", words, re.MULTILINE)
    return said.group()[:_WORDS] if said is not None and len(words) > _WORDS else words[:_WORDS]
