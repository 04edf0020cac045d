"""What a compiled grammar is to the engine, and what a backend is to this package. Torch-free.

    Grammar --matcher()--> Matcher     one a sequence: which tokens may follow, `advance` by the one that was chosen
    Backend --compile--> form (text, crosses between processes) --build--> TextGrammar --start--> TextMatcher

A backend knows only text; endings (which ids, when) are the Matcher's (matcher.py).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from engine.grammar.source import GrammarSource

if TYPE_CHECKING:  # an instance of the fake engine needs no numpy
    import numpy as np
    from numpy.typing import NDArray

Bits: TypeAlias = "NDArray[np.int32]"
"""One bit a token id, lowest bit first: [ceil(vocab_size / 32)] int32."""


class TextMatcher(Protocol):
    """Where one sequence stands in a grammar. Ids that end a sequence never come here."""

    @property
    def accepting(self) -> bool:
        """Whether the text so far is whole."""
        ...

    def advance(self, token_id: int) -> bool:
        """Take the text of `token_id`; False, unchanged, if it may not follow. Raises InvalidGrammar at a limit."""
        ...

    def allowed(self) -> Bits:
        """Return which text tokens may follow, as wide as the tokenizer. Raises InvalidGrammar at a limit."""
        ...


class TextGrammar(Protocol):
    """A grammar built in this process."""

    @property
    def worn(self) -> bool:
        """Whether what its matchers share is used up: who asks for it next should have it compiled anew."""
        ...

    def start(self) -> TextMatcher:
        """Return a matcher at the beginning. Any thread."""
        ...


class Backend(Protocol):
    """Compiles for one tokenizer."""

    def compile(self, source: GrammarSource) -> str:
        """Return the form that `build` takes. Raises InvalidGrammar. May crash, hang or eat memory: see child.py."""
        ...

    def build(self, form: str) -> TextGrammar:
        """Build what `compile` made, also in another process. Raises InvalidGrammar."""
        ...


class Matcher(Protocol):
    """What the engine uses for one sequence; one thread at a time."""

    @property
    def finished(self) -> bool:
        """Whether the text is whole and only ids that end the sequence may follow."""
        ...

    def advance(self, token_id: int) -> bool:
        """Take the chosen token; False, unchanged, if it is not allowed. Raises InvalidGrammar at a limit."""
        ...

    def replay(self, token_ids: Sequence[int]) -> None:
        """Take the outputs of a resumed sequence. Raises InvalidGrammar where one is not allowed."""
        ...

    def fill(self, row: Bits) -> None:
        """Write the allowed ids into `row`; at least one is. Raises InvalidGrammar at a limit or a dead end."""
        ...


class Grammar(Protocol):
    """A compiled grammar of one tokenizer and model; shared by all sequences that ask for it."""

    def matcher(self, stop_token_ids: Sequence[int] = ()) -> Matcher:
        """Return a matcher at the beginning for a request with these stop ids. Any thread."""
        ...
