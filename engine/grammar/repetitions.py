"""Bound the counts in `{n,m}`, whose cost is not bounded by the length of the text. Pure."""

import re

from engine.grammar.limits import GrammarLimits
from wire.errors import InvalidGrammar

_BRACES = re.compile(r"(?<!\\)\{\s*(\d*)\s*,?\s*(\d*)\s*\}")


def check_repetitions(text: str, limits: GrammarLimits) -> None:
    """Raise InvalidGrammar if a regex or grammar repeats something more often than the limit."""
    for found in _BRACES.finditer(text):
        for bound in found.groups():
            if len(bound) > 9 or int(bound or 0) > limits.repetitions:
                raise InvalidGrammar(f"{bound[:20]} repetitions, but the limit is {limits.repetitions}")
