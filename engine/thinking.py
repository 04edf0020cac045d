"""A sequence's state while it thinks: any token may follow, or the end token alone once the budget is spent.

    content --start token--> thinking --end token, forced at the budget--> content, bound by the grammar if there is one

With a grammar, the thinking comes once, before its text; without one a sequence may begin to think again, with a new
budget. The state follows from the output ids, so that any instance can continue a sequence.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.grammar.interface import Matcher
from wire.errors import InvalidGrammar
from wire.types import Thinking

if TYPE_CHECKING:
    from engine.grammar.interface import Bits


class ThinkingMatcher:
    """The Matcher of a sequence that thinks before the text of `grammar`. Mutable, one thread at a time."""

    def __init__(self, rule: Thinking, grammar: Matcher | None) -> None:
        self._rule, self._grammar = rule, grammar
        self._num_tokens = rule.num_before if rule.is_open else None  # of the thinking; None outside
        self._may_begin = not rule.is_open or grammar is None
        self._has_start = False  # whether the outputs contain this thinking's start token, which is not counted

    @property
    def finished(self) -> bool:
        """Whether the grammar's text is complete."""
        return self._num_tokens is None and self._grammar is not None and self._grammar.finished

    @property
    def is_free(self) -> bool:
        """Whether any token may follow."""
        return not self._must_end if self._num_tokens is not None else self._grammar is None

    @property
    def is_free_for_two(self) -> bool:
        """Whether any token may follow, and then any token after that one.

        False if there is a grammar, or if the first of the two tokens may use up the budget.
        """
        budget = self._rule.budget
        if self._grammar is not None or budget is None:
            return self._grammar is None
        return budget > (0 if self._num_tokens is None else self._num_tokens + 1)

    @property
    def _must_end(self) -> bool:
        budget = self._rule.budget
        return budget is not None and self._num_tokens is not None and self._num_tokens >= budget

    def advance(self, token_id: int) -> bool:
        """Advance by the chosen token, or return False if it is not allowed. Raises InvalidGrammar at a limit."""
        if self._num_tokens is not None:
            return self._advance_thinking(token_id, self._num_tokens)
        if token_id == self._rule.start_token_id and self._may_begin:
            self._num_tokens, self._may_begin, self._has_start = 0, self._grammar is None, True
            return True
        if self._grammar is None:
            return True
        taken = self._grammar.advance(token_id)
        self._may_begin = self._may_begin and not taken
        return taken

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance by the outputs of a resumed sequence. Raises InvalidGrammar if one is not allowed."""
        for index, token_id in enumerate(token_ids):
            if not self.advance(token_id):
                raise InvalidGrammar(
                    f"output token {index} is {token_id}, which the grammar or the thinking budget does not allow"
                )

    def fill(self, row: "Bits") -> None:
        """Write the allowed ids into `row`. Raises InvalidGrammar at a limit or a dead end of the grammar."""
        from engine.grammar.bits import set_bit  # numpy, which the fake engine may lack

        if self._must_end:
            row[:] = 0
            set_bit(row, self._rule.end_token_id, allowed=True)
        elif self._num_tokens is not None or self._grammar is None:
            row[:] = -1
        else:
            self._grammar.fill(row)
            if self._may_begin:
                set_bit(row, self._rule.start_token_id, allowed=True)

    def _advance_thinking(self, token_id: int, num_tokens: int) -> bool:
        if token_id == self._rule.end_token_id:
            self._num_tokens = None
        elif self._must_end:
            return False
        else:
            is_first_start = token_id == self._rule.start_token_id and not self._has_start
            self._has_start = self._has_start or is_first_start
            self._num_tokens = num_tokens + (not is_first_start)
        return True
