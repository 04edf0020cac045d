"""llguidance's matchers. All copies of one share a lexer, which grows with what any of them meets, up to a limit.

So where one sequence has used the lexer up, all that share it move to a fresh one, which the first to notice makes.
A sequence that fails at once in one that it made, or has made too many, fails. A lexer that takes too long to make on
the engine's thread is not made there: the grammar is then worn, and whoever prepares it next has it compiled anew.
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

_WORDS = 500
_EXCERPT = re.compile(r" |~|\d+: ")  # how a line of it, a caret below, or a frame around begins
_MOST_MADE = 3


class LlguidanceGrammar:
    """A built grammar: the matcher that all others are copied from, and how to make it anew."""

    def __init__(self, make: Callable[[], LLMatcher], tokenizer: LLTokenizer, *, longest_s: float) -> None:
        """`make` returns a fresh matcher. `longest_s` bounds the CPU time of a step, and of `make` in one.

        Raises InvalidGrammar where it comes in error.
        """
        self._make = make
        self.tokenizer, self.longest_s = tokenizer, longest_s
        self._lock = threading.Lock()  # a matcher may be used by one thread only, to be copied too
        self._generation = 0
        self.worn = False
        began = time.thread_time()
        self._first = make()
        self._make_s = time.thread_time() - began
        check(self._first)

    def start(self) -> "LlguidanceMatcher":
        """Return a matcher at the beginning. Any thread."""
        return LlguidanceMatcher(self)

    def copy(self) -> tuple[LLMatcher, int]:
        """Return a matcher at the beginning, and the generation of its lexer."""
        with self._lock:
            return self._first.deep_copy(), self._generation

    def renew(self, used_up: int) -> bool:
        """Have a fresh lexer in place of generation `used_up`; return whether it was made now, or was there already.

        Does nothing where making it would take too long.
        """
        with self._lock:
            if self._generation != used_up:
                return False
            self.worn = self._make_s > self.longest_s
            if not self.worn:
                self._first = self._make()
                self._generation += 1
            return not self.worn


class LlguidanceMatcher:
    """One sequence's place in the text."""

    def __init__(self, grammar: LlguidanceGrammar) -> None:
        self._grammar, self._tokenizer = grammar, grammar.tokenizer
        self._matcher, self._generation = grammar.copy()
        self._taken: list[int] = []
        self._made_at: list[int] = []

    @property
    def accepting(self) -> bool:
        """Whether the text so far is whole."""
        return self._matcher.is_accepting()

    def advance(self, token_id: int) -> bool:
        """Take the text of `token_id`; False, unchanged, if it may not follow. Raises InvalidGrammar at a limit."""
        if token_id >= self._tokenizer.vocab_size or token_id in self._tokenizer.eos_tokens:
            return False
        taken = self._matcher.try_consume_tokens([token_id])
        while self._moved():
            taken = self._matcher.try_consume_tokens([token_id])
        check(self._matcher)
        if taken:
            self._taken.append(token_id)
        return taken == 1

    def allowed(self) -> Bits:
        """Return which text tokens may follow. Raises InvalidGrammar at a limit, the step's CPU time among them."""
        began = time.thread_time()
        mask = self._matcher.compute_bitmask()
        check_time(time.thread_time() - began, self._grammar.longest_s)
        while self._moved():
            mask = self._matcher.compute_bitmask()
        check(self._matcher)
        bits = np.frombuffer(mask, dtype=np.int32).copy()
        for token_id in self._tokenizer.eos_tokens:
            set_bit(bits, token_id, allowed=False)
        return bits

    def _moved(self) -> bool:
        """Where the shared lexer is used up, go to a fresh one. Returns whether we did."""
        if not self._matcher.is_error() or not self._matcher.get_error().startswith("lexer error"):
            return False
        may_make = len(self._made_at) < _MOST_MADE and len(self._taken) not in self._made_at
        if may_make and self._grammar.renew(self._generation):
            self._made_at.append(len(self._taken))
        fresh, generation = self._grammar.copy()
        if generation == self._generation:
            return False
        self._matcher, self._generation = fresh, generation
        self._matcher.try_consume_tokens(self._taken)
        return True


def check(matcher: LLMatcher) -> None:
    """Raise InvalidGrammar, in its words, where a matcher is in error."""
    if matcher.is_error():
        raise InvalidGrammar(in_one_line(matcher.get_error().split("\n<", 1)[0].strip()))


def in_one_line(words: str) -> str:
    """Return what a parser says is wrong, and where, without the excerpts of what it was given."""
    if words.startswith("NoExtension"):
        return "no text satisfies it"
    said = re.search(r"^error: .*", words, re.MULTILINE)
    if said is not None and len(words) > _WORDS:
        return said.group()[:_WORDS]
    return " ".join(line for line in words.splitlines() if not _EXCERPT.match(line))[:_WORDS]
