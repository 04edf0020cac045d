"""Test a compiled grammar in the compiling child: generate a random text and check that it stays within the limits."""

import random
import time

import numpy as np

from engine.grammar.interface import TextMatcher
from engine.grammar.limits import GrammarLimits
from engine.grammar.source import GrammarKind
from wire.errors import InvalidGrammar

_STEPS = 64
_GRAMMAR_STEPS = 256  # an ambiguous grammar's work grows with the text


def walk(matcher: TextMatcher, limits: GrammarLimits, kind: GrammarKind) -> None:
    """Generate a random text. Raises InvalidGrammar if there is none, a limit is reached, or a step is slow."""
    chooser = random.Random(0)  # noqa: S311 - not a secret
    for step in range(_GRAMMAR_STEPS if kind is GrammarKind.GRAMMAR else _STEPS):
        began = time.thread_time()
        may_continue = _step(matcher, chooser, is_first=step == 0)
        check_time(time.thread_time() - began, limits.fill_s)
        if not may_continue:
            return


def check_time(took_s: float, limit_s: float) -> None:
    """Raise InvalidGrammar if one step took too much CPU time."""
    if took_s > limit_s:
        raise InvalidGrammar(
            f"one step of the grammar takes {took_s:.3f} s of CPU time, but the limit is {limit_s:g} s"
        )


def _step(matcher: TextMatcher, chooser: random.Random, *, is_first: bool) -> bool:
    allowed = np.flatnonzero(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little"))
    if not len(allowed):
        if is_first and not matcher.accepting:
            raise InvalidGrammar("no text matches the grammar")
        return False
    return matcher.advance(int(chooser.choice(allowed)))
