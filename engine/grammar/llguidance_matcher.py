"""llguidance's matchers. All copies of one share a lexer, which grows with each copy's text, up to a limit.

When the lexer is used up, the first sequence to notice creates a new one, and all others switch to it. A sequence
fails if a lexer that it created is used up at once, or if it has created too many. If a new lexer would take too long
on the engine's thread, none is created: the grammar is exhausted, and is recompiled for the next request.
"""

import re
import threading
import time
from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.grammar.bits import set_bit
from engine.grammar.interface import Bits
from engine.grammar.walk import check_time
from wire.errors import InvalidGrammar

_MAX_CHARS = 500
_EXCERPT = re.compile(r" |~|\d+: ")  # the start of a quoted line, of a caret line below it, or of a frame
_MAX_MADE = 3


class LlguidanceGrammar:
    """A built grammar: the matcher that all others are copied from, and a function that makes a fresh one."""

    def __init__(self, make: Callable[[], LLMatcher], tokenizer: LLTokenizer, *, longest_s: float) -> None:
        """`make` returns a fresh matcher. `longest_s` bounds the CPU time of a step, including `make`.

        Raises InvalidGrammar if the new matcher is in error.
        """
        self._make = make
        self.tokenizer, self.longest_s = tokenizer, longest_s
        self._lock = threading.Lock()  # only one thread at a time may use a matcher, even to copy it
        self._generation = 0
        self.exhausted = False
        began = time.thread_time()
        self._first = make()
        self._make_s = time.thread_time() - began
        check(self._first)

    def start(self) -> "LlguidanceMatcher":
        """Return a matcher at the start of the text. Any thread."""
        return LlguidanceMatcher(self)

    def copy(self) -> tuple[LLMatcher, int]:
        """Return a matcher at the start of the text, and the generation of its lexer."""
        with self._lock:
            return self._first.deep_copy(), self._generation

    def renew(self, used_up: int) -> bool:
        """Replace the lexer of generation `used_up`; return whether this call made the fresh one.

        Does nothing if making a fresh one would take too long.
        """
        with self._lock:
            if self._generation != used_up:
                return False
            self.exhausted = self._make_s > self.longest_s
            if not self.exhausted:
                self._first = self._make()
                self._generation += 1
            return not self.exhausted


class LlguidanceMatcher:
    """One sequence's state in the text."""

    def __init__(self, grammar: LlguidanceGrammar) -> None:
        self._grammar, self._tokenizer = grammar, grammar.tokenizer
        self._matcher, self._generation = grammar.copy()
        self._taken: list[int] = []
        self._made_at: list[int] = []

    @property
    def accepting(self) -> bool:
        """Whether the text so far is complete."""
        return self._matcher.is_accepting()

    def advance(self, token_id: int) -> bool:
        """Advance by `token_id`, or return False if it may not follow. Raises InvalidGrammar at a limit."""
        if token_id >= self._tokenizer.vocab_size or token_id in self._tokenizer.eos_tokens:
            return False
        taken = self._matcher.try_consume_tokens([token_id])
        while self._switch_lexer():
            taken = self._matcher.try_consume_tokens([token_id])
        check(self._matcher)
        if taken:
            self._taken.append(token_id)
        return taken == 1

    def allowed(self) -> Bits:
        """Return which text tokens may follow. Raises InvalidGrammar at a limit, such as the step's CPU time."""
        began = time.thread_time()
        mask = self._matcher.compute_bitmask()
        check_time(time.thread_time() - began, self._grammar.longest_s)
        while self._switch_lexer():
            mask = self._matcher.compute_bitmask()
        check(self._matcher)
        bits = np.frombuffer(mask, dtype=np.int32).copy()
        for token_id in self._tokenizer.eos_tokens:
            set_bit(bits, token_id, allowed=False)
        return bits

    def _switch_lexer(self) -> bool:
        """Move to a fresh lexer if the shared one is used up. Return whether it moved."""
        if not self._matcher.is_error() or not self._matcher.get_error().startswith("lexer error"):
            return False
        may_make = len(self._made_at) < _MAX_MADE and len(self._taken) not in self._made_at
        if may_make and self._grammar.renew(self._generation):
            self._made_at.append(len(self._taken))
        fresh, generation = self._grammar.copy()
        if generation == self._generation:
            return False
        self._matcher, self._generation = fresh, generation
        self._matcher.try_consume_tokens(self._taken)
        return True


def check(matcher: LLMatcher) -> None:
    """Raise InvalidGrammar, with the matcher's message, if the matcher is in error."""
    if matcher.is_error():
        raise InvalidGrammar(in_one_line(matcher.get_error().split("\n<", 1)[0].strip()))


def in_one_line(message: str) -> str:
    """Return a parser's error and its position on one line, without excerpts of its input."""
    if message.startswith("NoExtension"):
        return "no text matches the grammar"
    found = re.search(r"^error: .*", message, re.MULTILINE)
    if found is not None and len(message) > _MAX_CHARS:
        return found.group()[:_MAX_CHARS]
    return " ".join(line for line in message.splitlines() if not _EXCERPT.match(line))[:_MAX_CHARS]
