"""The second backend: xgrammar. It compiles to masks, supports structural tags, and has no step limits of its own.

So the child runs a random walk on each grammar and refuses it where a step takes too long; if a grammar becomes slow
later, the sequence with the first slow step fails.
"""

import json
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.grammar.bits import set_bit
from engine.grammar.interface import Bits
from engine.grammar.limits import GrammarLimits
from engine.grammar.repetitions import check_repetitions
from engine.grammar.source import GrammarKind, GrammarSource
from engine.grammar.tokenizer_file import TokenizerFile
from engine.grammar.walk import check_time, walk
from engine.grammar.xgrammar_binding import load_binding
from engine.grammar.xgrammar_schema import check_kept
from wire.errors import InvalidGrammar

_RAW = 0  # the vocabulary is bytes already
_NO_LIMIT = -1
_MOST_BLANKS = 8  # the compiled form grows with each
_CONTROLS = frozenset(range(0x20)) - {0x0A, 0x0D}  # allowed, wrongly, in JSON strings with a maxLength
_MOST_CHARS = 500


class XgrammarBackend:
    """Compiles for one tokenizer, given as each token's bytes."""

    def __init__(self, tokenizer: TokenizerFile, limits: GrammarLimits, token_bytes: Sequence[bytes]) -> None:
        """Load the library. Raises ModuleNotFoundError if it is not installed."""
        self._limits = limits
        self._library = load_binding()
        eos = [token_id for token_id in tokenizer.eos_token_ids if token_id < len(token_bytes)]
        without = [b"" if _CONTROLS.intersection(token) else token for token in token_bytes]
        self._info, self._json_info = (
            self._library.tokenizer_info(tokens, _RAW, len(tokens), eos, False)
            for tokens in (list(token_bytes), without)
        )
        self._compiler, self._json_compiler = (
            self._library.grammar_compiler(info, 1, False, _NO_LIMIT) for info in (self._info, self._json_info)
        )

    @property
    def num_tokens(self) -> int:
        """Token ids of the tokenizer."""
        return int(self._info.vocab_size())

    def compile(self, source: GrammarSource) -> str:
        """Return the kind and the compiled grammar as JSON. Raises InvalidGrammar."""
        try:
            compiled = self._compiled(source)
        except RuntimeError as error:
            raise InvalidGrammar(_message(error)) from error
        walk(self._grammar_of(compiled).start(), self._limits, source.kind)
        return source.kind + " " + str(compiled.serialize_json())

    def build(self, form: str) -> "XgrammarGrammar":
        """Build from the form of `compile`. Raises InvalidGrammar."""
        kind, _, compiled = form.partition(" ")
        info = self._json_info if kind == GrammarKind.JSON else self._info
        try:
            return self._grammar_of(self._library.compiled_grammar.deserialize_json(compiled, info))
        except RuntimeError as error:
            raise InvalidGrammar(_message(error)) from error

    def new_matcher(self, compiled: Any) -> Any:
        """Return the library's matcher of `compiled`; SequenceMatcher handles the ids that end a sequence."""
        return self._library.grammar_matcher(compiled, None, False, _NO_LIMIT, None)

    def stop_token_ids(self) -> list[int]:
        """Ids that the library treats as end of sequence, from its options or from the vocabulary."""
        return [int(token_id) for token_id in self._info.stop_token_ids()]

    def _grammar_of(self, compiled: Any) -> "XgrammarGrammar":
        return XgrammarGrammar(self, compiled, longest_s=self._limits.fill_s)

    def _compiled(self, source: GrammarSource) -> Any:
        compiler, text = self._compiler, source.text
        if source.kind is GrammarKind.REGEX:
            check_repetitions(text, self._limits)
            return compiler.compile_regex(text)
        if source.kind is GrammarKind.CHOICE:
            texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in sorted(set(json.loads(text))))
            return compiler.compile_grammar_from_strings(f"root ::= {texts}", "root")
        if source.kind is GrammarKind.GRAMMAR:
            check_repetitions(text, self._limits)
            return self._grammar(text)
        if source.kind is GrammarKind.STRUCTURAL_TAG:
            return compiler.compile_structural_tag(_with_format(json.loads(text)))
        if source.whitespace not in (None, ""):
            raise InvalidGrammar(f'xgrammar has no whitespace pattern but ""; {source.whitespace!r} needs llguidance')
        check_kept(json.loads(text))
        blanks = source.whitespace is None
        separators, most = (None, _MOST_BLANKS) if blanks else ((",", ":"), None)
        return self._json_compiler.compile_json_schema(text, blanks, None, separators, False, most, False)

    def _grammar(self, text: str) -> Any:
        def ebnf() -> Any:
            return self._compiler.compile_grammar_from_strings(text, "root")

        def lark() -> Any:
            return self._compiler.compile_lark(text, [], [])

        first, second = (ebnf, lark) if "::=" in text else (lark, ebnf)
        try:
            return first()
        except RuntimeError as error:
            try:
                return second()
            except RuntimeError as other:
                both = f"as {first.__name__}: {_message(error)}; as {second.__name__}: {_message(other)}"
                raise InvalidGrammar(f"the grammar is neither: {both}") from other


class XgrammarGrammar:
    """A compiled grammar in this process. `longest_s` bounds the CPU time of each half of a sequence's step."""

    def __init__(self, backend: XgrammarBackend, compiled: Any, *, longest_s: float) -> None:
        self._backend, self.compiled, self._longest_s = backend, compiled, longest_s
        self.worn = False  # its matchers share no growing state

    def start(self) -> "XgrammarMatcher":
        """Return a matcher at the start of the text. Any thread."""
        matcher = self._backend.new_matcher(self.compiled)
        stops = self._backend.stop_token_ids()
        return XgrammarMatcher(matcher, self._backend.num_tokens, stops, longest_s=self._longest_s)


class XgrammarMatcher:
    """One sequence's state in the text."""

    def __init__(self, matcher: Any, num_tokens: int, stop_token_ids: list[int], *, longest_s: float) -> None:
        self._matcher, self._stops, self._num_tokens = matcher, stop_token_ids, num_tokens
        self._longest_s = longest_s

    @property
    def accepting(self) -> bool:
        """Whether the text so far is complete."""
        return bool(self._matcher.is_completed())

    def advance(self, token_id: int) -> bool:
        """Advance by `token_id`; return False, unchanged, if it may not follow. Raises InvalidGrammar if too slow."""
        if token_id in self._stops or token_id >= self._num_tokens:
            return False
        began = time.thread_time()
        taken = bool(self._matcher.accept_token(token_id, False))
        check_time(time.thread_time() - began, self._longest_s)
        return taken

    def allowed(self) -> Bits:
        """Return which text tokens may follow. Raises InvalidGrammar if finding them took too long."""
        row = np.zeros((1, (self._num_tokens + 31) // 32), dtype=np.int32)
        began = time.thread_time()
        limited = self._matcher.fill_next_token_bitmask(row, 0, False)
        check_time(time.thread_time() - began, self._longest_s)
        if not limited:
            row[:] = -1  # all of them
            row[0, -1] = (1 << (self._num_tokens % 32)) - 1 if self._num_tokens % 32 else -1
        for token_id in self._stops:
            set_bit(row[0], token_id, allowed=False)
        bits: Bits = row[0]
        return bits


def _with_format(tag: dict[str, Any]) -> str:
    """Return a structural tag in the form with `format`; the older one has structures and triggers."""
    if "format" in tag:
        return json.dumps(tag)
    tags = [
        {
            "type": "tag",
            "begin": structure.get("begin"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
            "end": structure.get("end"),
        }
        for structure in tag.get("structures", ())
    ]
    formatted = {"type": "triggered_tags", "triggers": tag.get("triggers", []), "tags": tags}
    return json.dumps({"type": "structural_tag", "format": formatted})


def _message(error: Exception) -> str:
    """Return the first line of the error, without xgrammar's time and source line."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[\d:]+\] \S+\.cc:\d+: ", "", first)[:_MOST_CHARS]
