"""Order the tokens of one prompt: release by output index, hold early ones back, drop duplicates."""

from wire.errors import InternalError
from wire.types import PromptLogprobs, TokenOutput


class OrderedOutput:
    """The sequences of one prompt. Tokens arrive from P and D in any order; each is released once, in order.

    `started`: a token was released. `open` are the sequences that need more tokens, `stopped` those that `stop` ended.
    """

    def __init__(self, num_sequences: int) -> None:
        self.started = False
        self.open = set(range(num_sequences))
        self.stopped: set[int] = set()
        self._ids: list[list[int]] = [[] for _ in range(num_sequences)]
        self._early: list[dict[int, TokenOutput]] = [{} for _ in range(num_sequences)]

    @property
    def all_started(self) -> bool:
        """Whether the first token of every sequence was released or is no longer needed."""
        return all(self._ids[sequence] for sequence in self.open)

    @property
    def so_far(self) -> tuple[tuple[int, ...], ...]:
        """The released token ids of each sequence, from which a retry continues. Empty until `started`."""
        return tuple(map(tuple, self._ids)) if self.started else ()

    @property
    def num_tokens(self) -> int:
        """Number of released tokens, over all sequences."""
        return sum(map(len, self._ids))

    @property
    def all_finished(self) -> bool:
        """Whether every sequence finished by itself, none by `stop`."""
        return not self.open and not self.stopped

    def add(self, token: TokenOutput) -> list[TokenOutput]:
        """Add one token; return those that can be released now."""
        sequence = token.sequence
        if sequence not in self.open:
            return []
        ids, early = self._ids[sequence], self._early[sequence]
        if token.index != len(ids):
            if token.index > len(ids):
                early.setdefault(token.index, token)
            return []
        self.started = True
        released: list[TokenOutput] = []
        ready: TokenOutput | None = token
        while ready is not None:
            released.append(ready)
            if ready.token_id is not None:
                ids.append(ready.token_id)
            if ready.finish is not None:
                self._end(sequence)
            ready = early.pop(len(ids), None)
        return released

    def stop(self, sequence: int) -> None:
        """End a sequence from the scheduler, unless it has ended."""
        if sequence in self.open:
            self.stopped.add(sequence)
            self._end(sequence)

    def forget_early(self) -> None:
        """Drop tokens held back: the next attempt generates them again."""
        for early in self._early:
            early.clear()

    def _end(self, sequence: int) -> None:
        self.open.remove(sequence)
        self._early[sequence].clear()


class OrderedScores:
    """The log probabilities of one prompt's tokens. They arrive per chunk, in every attempt; each is released once."""

    def __init__(self) -> None:
        self._next = 0

    def add(self, part: PromptLogprobs) -> PromptLogprobs | None:
        """Return the unreleased rest of `part`, or None. Raises InternalError if tokens before it have not arrived."""
        known = self._next - part.start
        if known < 0:
            raise InternalError(f"log probabilities of prompt token {part.start} arrived before those of {self._next}")
        if known >= len(part.tokens):
            return None
        self._next = part.start + len(part.tokens)
        return PromptLogprobs(part.prompt_id, part.start + known, part.tokens[known:])
