"""The interfaces of a compiled grammar for the engine, and of a backend for this package. Torch-free.

    Grammar --matcher()--> Matcher     one per sequence: which tokens may follow, `advance` by the chosen one
    Backend --compile--> form (text, sent between processes) --build--> TextGrammar --start--> TextMatcher

A backend handles only text; the Matcher (matcher.py) decides when end-of-sequence ids are allowed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from engine.grammar.source import GrammarSource

if TYPE_CHECKING:  # an instance with the fake engine needs no numpy
    import numpy as np
    from numpy.typing import NDArray

Bits: TypeAlias = "NDArray[np.int32]"
"""One bit per token id, lowest bit first: [ceil(vocab_size / 32)] int32."""


class TextMatcher(Protocol):
    """The state of one sequence in a grammar. It never receives ids that end a sequence."""

    @property
    def accepting(self) -> bool:
        """Whether the text so far is complete."""
        ...

    def advance(self, token_id: int) -> bool:
        """Advance by `token_id`, or return False if it may not follow. Raises InvalidGrammar at a limit."""
        ...

    def allowed(self) -> Bits:
        """Return which text tokens may follow, as wide as the tokenizer. Raises InvalidGrammar at a limit."""
        ...


class TextGrammar(Protocol):
    """A grammar built in this process."""

    @property
    def exhausted(self) -> bool:
        """Whether the lexer that its matchers share is used up: then recompile the grammar for the next request."""
        ...

    def start(self) -> TextMatcher:
        """Return a matcher at the start of the text. Any thread."""
        ...


class Backend(Protocol):
    """Compiles for one tokenizer."""

    def compile(self, source: GrammarSource) -> str:
        """Return the form that `build` accepts. Raises InvalidGrammar. May crash, hang or fill memory: see child.py."""
        ...

    def build(self, form: str) -> TextGrammar:
        """Build from the form of `compile`, also in another process. Raises InvalidGrammar."""
        ...


class Matcher(Protocol):
    """The engine's interface for one sequence; only one thread at a time may use it."""

    @property
    def finished(self) -> bool:
        """Whether the text is complete and only ids that end the sequence may follow."""
        ...

    @property
    def is_free(self) -> bool:
        """Whether any token may follow, so that no mask is needed."""
        ...

    @property
    def is_free_for_two(self) -> bool:
        """Whether any token may follow, and then any token after that one."""
        ...

    def advance(self, token_id: int) -> bool:
        """Advance by the chosen token, or return False if it is not allowed. Raises InvalidGrammar at a limit."""
        ...

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance by the outputs of a resumed sequence. Raises InvalidGrammar if one is not allowed."""
        ...

    def fill(self, row: Bits) -> None:
        """Write the allowed ids into `row`; at least one is. Raises InvalidGrammar at a limit or a dead end."""
        ...


class Grammar(Protocol):
    """A compiled grammar of one tokenizer and model; shared by all sequences that use it."""

    def matcher(self, stop_token_ids: Sequence[int] = ()) -> Matcher:
        """Return a matcher at the start of the text for a request with these stop ids. Any thread."""
        ...
