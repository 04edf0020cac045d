"""The grammar backend on llguidance, which enforces limits of its own in each step."""

import json
import re
from typing import TYPE_CHECKING

import llguidance
from llguidance import LLMatcher, LLTokenizer

from engine.grammar.ebnf import ebnf_to_lark, looks_like_ebnf
from engine.grammar.limits import GrammarLimits, StepLimits
from engine.grammar.llguidance_matcher import LlguidanceGrammar, in_one_line
from engine.grammar.regex import to_rust
from engine.grammar.repetitions import check_repetitions
from engine.grammar.source import GrammarKind, GrammarSource
from engine.grammar.structural_tag import tags_to_lark
from engine.grammar.tokenizer_file import TokenizerFile
from engine.grammar.walk import walk
from wire.errors import InvalidGrammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,32}"  # JSON's own, bounded so that a model cannot write blanks forever
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")


class LlguidanceBackend:
    """Compiles for one tokenizer. Thread-safe once made."""

    def __init__(self, tokenizer: TokenizerFile, limits: GrammarLimits, steps: StepLimits) -> None:
        """Load the tokenizer (0.3 s for 49,152 tokens). Raises InvalidGrammar if llguidance cannot use it."""
        self._limits = limits
        self._tokenizer = _load(tokenizer)
        self._steps = steps

    def compile(self, source: GrammarSource) -> str:
        """Return the kind and llguidance's text for `source`, tested by a random walk. Raises InvalidGrammar."""
        if source.kind is not GrammarKind.GRAMMAR:
            return self._check_form(source.kind, self._text(source))
        lark, ebnf = self._try_lark, self._try_ebnf
        first, second = (ebnf, lark) if looks_like_ebnf(source.text) else (lark, ebnf)
        try:
            return first(source.text)
        except InvalidGrammar as error:
            try:
                return second(source.text)
            except InvalidGrammar as other:
                raise InvalidGrammar(f"the grammar is neither Lark nor EBNF: {error}; {other}") from other

    def build(self, form: str) -> "LlguidanceGrammar":
        """Build a grammar from what `compile` returned. Raises InvalidGrammar."""
        kind, _, text = form.partition(" ")

        def make() -> LLMatcher:
            return LLMatcher(self._tokenizer, text, log_level=0, limits=_parser_limits(self._steps, kind))

        return LlguidanceGrammar(make, self._tokenizer, longest_s=self._limits.fill_s)

    def _text(self, source: GrammarSource) -> str:
        if source.kind is GrammarKind.REGEX:
            check_repetitions(source.text, self._limits)
            return LLMatcher.grammar_from_regex(to_rust(source.text))
        if source.kind is GrammarKind.CHOICE:
            texts = sorted(set(json.loads(source.text)), key=len)
            return LLMatcher.grammar_from_regex("|".join(_META.sub(r"\\\g<0>", text) for text in texts))
        if source.kind is GrammarKind.STRUCTURAL_TAG:
            options = _json_options(source.whitespace)
            return LLMatcher.grammar_from_lark(tags_to_lark(source.text, options, self._limits))
        try:
            return LLMatcher.grammar_from_json_schema(source.text, overrides=_json_options(source.whitespace))
        except ValueError as error:
            raise InvalidGrammar(f"the JSON schema cannot be read: {in_one_line(str(error))}") from error

    def _try_lark(self, text: str) -> str:
        check_repetitions(text, self._limits)
        try:
            return self._check_form(GrammarKind.GRAMMAR, LLMatcher.grammar_from_lark(text))
        except InvalidGrammar as error:
            raise InvalidGrammar(f"as Lark: {error}") from error

    def _try_ebnf(self, text: str) -> str:
        try:
            return self._check_form(GrammarKind.GRAMMAR, LLMatcher.grammar_from_lark(ebnf_to_lark(text, self._limits)))
        except InvalidGrammar as error:
            raise InvalidGrammar(f"as EBNF: {error}") from error

    def _check_form(self, kind: GrammarKind, text: str) -> str:
        form = f"{kind} {text}"
        walk(self.build(form).start(), self._limits, kind)
        return form


def _json_options(whitespace: str | None) -> "JsonCompileOptions":
    return {
        "whitespace_pattern": _WHITESPACE if whitespace is None else whitespace,
        "json_allow_general_unicode_escapes": True,
    }


def _parser_limits(steps: StepLimits, kind: str) -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        max_items_in_row=steps.items_in_row,
        initial_lexer_fuel=steps.initial_lexer_fuel,
        step_lexer_fuel=steps.lexer_fuel,
        step_max_items=steps.grammar_items if kind == GrammarKind.GRAMMAR else steps.items,
        max_lexer_states=steps.lexer_states,
        max_grammar_size=steps.grammar_symbols,
        verbose_errors=False,
    )


def _load(tokenizer: TokenizerFile) -> LLTokenizer:
    text = tokenizer.read()
    try:
        return _create_tokenizer(text, list(tokenizer.eos_token_ids))
    except ValueError as error:
        raise InvalidGrammar(f"structured output is not possible with this model's tokenizer: {error}") from error


def _create_tokenizer(text: str, eos: list[int]) -> LLTokenizer:
    """Create the tokenizer only once if possible: creation holds the GIL for 0.25 s, longer for a large vocabulary."""
    if not eos:
        return LLTokenizer(text)
    try:
        return LLTokenizer(text, eos_token=eos)
    except ValueError:  # some models list ids that their tokenizers lack
        found = LLTokenizer(text)
        known = [token_id for token_id in eos if token_id < found.vocab_size]
        return LLTokenizer(text, eos_token=known) if known else found
