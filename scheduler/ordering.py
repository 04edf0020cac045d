"""Order the tokens of one prompt: release by output index, hold early ones back, drop duplicates."""

from wire.errors import InternalError
from wire.types import PromptLogprobs, TokenOutput


class OrderedOutput:
    """The sequences of one prompt. Tokens arrive from P and D in any order; each is released once, in order."""

    def __init__(self, num_sequences: int) -> None:
        self._next = [0] * num_sequences
        self._ids: list[list[int]] = [[] for _ in range(num_sequences)]
        self._early: list[dict[int, TokenOutput]] = [{} for _ in range(num_sequences)]
        self._finished: set[int] = set()
        self._stopped: set[int] = set()

    @property
    def started(self) -> bool:
        """Whether any token was released."""
        return any(self._next) or bool(self._finished)

    @property
    def all_started(self) -> bool:
        """Whether the first token of every sequence was released or is no longer needed."""
        return all(index > 0 or self._ended(sequence) for sequence, index in enumerate(self._next))

    @property
    def so_far(self) -> tuple[tuple[int, ...], ...]:
        """The released token ids of each sequence, from which a retry continues. Empty before the first."""
        return tuple(map(tuple, self._ids)) if self.started else ()

    @property
    def num_tokens(self) -> int:
        """Number of released tokens, over all sequences."""
        return sum(map(len, self._ids))

    @property
    def all_ended(self) -> bool:
        """Whether no sequence needs another token."""
        return len(self._finished | self._stopped) == len(self._next)

    @property
    def all_finished(self) -> bool:
        """Whether every sequence finished by itself, none by `stop`."""
        return len(self._finished) == len(self._next)

    def is_stopped(self, sequence: int) -> bool:
        """Whether `stop` ended the sequence."""
        return sequence in self._stopped

    def add(self, token: TokenOutput) -> list[TokenOutput]:
        """Add one token; return those that can be released now."""
        sequence = token.sequence
        if not 0 <= sequence < len(self._next) or self._ended(sequence) or token.index < self._next[sequence]:
            return []
        self._early[sequence].setdefault(token.index, token)
        return self._release(sequence)

    def stop(self, sequence: int) -> bool:
        """End a sequence from the scheduler; return whether it was still open."""
        if self._ended(sequence):
            return False
        self._stopped.add(sequence)
        self._early[sequence].clear()
        return True

    def forget_early(self) -> None:
        """Drop tokens held back: the next attempt generates them again."""
        for early in self._early:
            early.clear()

    def _ended(self, sequence: int) -> bool:
        return sequence in self._finished or sequence in self._stopped

    def _release(self, sequence: int) -> list[TokenOutput]:
        early, released = self._early[sequence], []
        while not self._ended(sequence) and (token := early.pop(self._next[sequence], None)) is not None:
            released.append(token)
            self._next[sequence] += 1
            if token.token_id is not None:
                self._ids[sequence].append(token.token_id)
            if token.finish is not None:
                self._finished.add(sequence)
                early.clear()
        return released


class OrderedScores:
    """The log probabilities of one prompt's tokens. Sent per chunk, again in every attempt; each is released once."""

    def __init__(self) -> None:
        self._next = 0

    def add(self, part: PromptLogprobs) -> PromptLogprobs | None:
        """Return the unreleased rest of `part`, None if there is none. Raises InternalError for a gap before it."""
        known = self._next - part.start
        if known < 0:
            raise InternalError(f"log probabilities of prompt token {part.start} arrived before those of {self._next}")
        if known >= len(part.tokens):
            return None
        self._next = part.start + len(part.tokens)
        return PromptLogprobs(part.prompt_id, part.start + known, part.tokens[known:])
