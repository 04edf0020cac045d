"""A sequence's state in a grammar: which ids may follow, including those that end it, as wide as the model's logits."""

from collections.abc import Sequence

import numpy as np

from engine.grammar.bits import set_bit
from engine.grammar.interface import Bits, TextGrammar, TextMatcher
from engine.grammar.source import GrammarKind
from engine.grammar.tokenizer_file import TokenizerFile
from wire.errors import InvalidGrammar


class CompiledGrammar:
    """The Grammar over any backend's text grammar. `cost_bytes` is its approximate memory."""

    def __init__(self, text: TextGrammar, tokenizer: TokenizerFile, kind: GrammarKind, cost_bytes: int) -> None:
        self._text, self._tokenizer, self._kind = text, tokenizer, kind
        self.cost_bytes = cost_bytes

    @property
    def exhausted(self) -> bool:
        """Whether it should be recompiled for the next request."""
        return self._text.exhausted

    def matcher(self, stop_token_ids: Sequence[int] = ()) -> "SequenceMatcher":
        """Return a matcher at the start of the text for a request with these stop ids. Any thread."""
        return SequenceMatcher(self._text.start(), self._tokenizer, self._kind, stop_token_ids)


class SequenceMatcher:
    """The Matcher over any backend's matcher. Mutable, for one sequence, one thread at a time.

    The model's end-of-sequence ids are allowed exactly where the text is complete; a request's other stop ids are
    allowed there too, and where their text may follow. After such an id only such ids may follow, so that a request
    with ignore_eos can continue.
    """

    def __init__(
        self, text: TextMatcher, tokenizer: TokenizerFile, kind: GrammarKind, stop_token_ids: Sequence[int]
    ) -> None:
        self._text, self._kind, self._vocab_size = text, kind, tokenizer.vocab_size
        self._eos = frozenset(_in_vocabulary(tokenizer.eos_token_ids, tokenizer.vocab_size))
        self._enders = self._eos | set(_in_vocabulary(stop_token_ids, tokenizer.vocab_size))
        self._ended = False
        self._length = 0

    @property
    def finished(self) -> bool:
        """Whether the text is complete and only ids that end the sequence may follow."""
        return self._ended or (self._text.accepting and not self._text_row().any())

    @property
    def is_free(self) -> bool:
        """Return False: a grammar bounds every token."""
        return False

    @property
    def is_free_for_two(self) -> bool:
        """Return False."""
        return False

    def advance(self, token_id: int) -> bool:
        """Advance by the chosen token, or return False if it is not allowed. Raises InvalidGrammar at a limit."""
        taken = self._take(token_id)
        self._length += taken
        return taken

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance by the outputs of a resumed sequence. Raises InvalidGrammar if one is not allowed."""
        for token_id in token_ids:
            if not self.advance(token_id):
                raise InvalidGrammar(f"output token {self._length} is {token_id}, which the grammar does not allow")

    def fill(self, row: Bits) -> None:
        """Write the allowed ids into `row` [ceil(vocab_size / 32)] int32. Raises InvalidGrammar if none is allowed."""
        row[:] = 0 if self._ended else self._text_row()
        if self._ended or self._text.accepting:
            for token_id in self._enders:
                set_bit(row, token_id, allowed=True)
        if not row.any():
            raise InvalidGrammar(f"the grammar allows no token after {self._outputs()}")

    def _take(self, token_id: int) -> bool:
        is_text = token_id not in self._eos and 0 <= token_id < self._vocab_size
        try:
            if is_text and not self._ended and self._text.advance(token_id):
                return True
        except InvalidGrammar as error:
            raise self._at_limit(error) from error
        if token_id in self._enders and (self._ended or self._text.accepting):
            self._ended = True
        return self._ended and token_id in self._enders

    def _text_row(self) -> Bits:
        """Return the text tokens that may follow, as wide as the model's logits, with only ids of the tokenizer."""
        row = np.zeros((self._vocab_size + 31) // 32, dtype=np.int32)
        try:
            allowed = self._text.allowed()[: len(row)]
        except InvalidGrammar as error:
            raise self._at_limit(error) from error
        row[: len(allowed)] = allowed
        if self._vocab_size % 32:
            row[-1] &= (1 << (self._vocab_size % 32)) - 1
        for token_id in self._eos:
            set_bit(row, token_id, allowed=False)
        return row

    def _at_limit(self, error: InvalidGrammar) -> InvalidGrammar:
        change = "make it unambiguous" if self._kind is GrammarKind.GRAMMAR else "simplify it"
        return InvalidGrammar(
            f"the grammar cannot continue after {self._outputs()}: {error}; {change}, or request fewer tokens"
        )

    def _outputs(self) -> str:
        return "1 output token" if self._length == 1 else f"{self._length} output tokens"


def _in_vocabulary(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    return [token_id for token_id in token_ids if 0 <= token_id < vocab_size]
