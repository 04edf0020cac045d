"""Bring the tokens of one prompt into order: emit by output index, hold early ones, drop repeats."""

from wire.errors import InternalError
from wire.types import PromptLogprobs, TokenOutput


class OrderedOutput:
    """The sequences of one prompt. Tokens come from P and D in any order; they leave in order, each once."""

    def __init__(self, num_sequences: int) -> None:
        self._next = [0] * num_sequences
        self._ids: list[list[int]] = [[] for _ in range(num_sequences)]
        self._early: list[dict[int, TokenOutput]] = [{} for _ in range(num_sequences)]
        self._finished: set[int] = set()
        self._stopped: set[int] = set()

    @property
    def started(self) -> bool:
        """Whether any token left."""
        return any(self._next) or bool(self._finished)

    @property
    def all_started(self) -> bool:
        """Whether the first token of every sequence left or is no longer wanted."""
        return all(index > 0 or self._ended(sequence) for sequence, index in enumerate(self._next))

    @property
    def so_far(self) -> tuple[tuple[int, ...], ...]:
        """The token ids that left, of each sequence: what another attempt goes on from. Empty before the first."""
        return tuple(map(tuple, self._ids)) if self.started else ()

    @property
    def num_tokens(self) -> int:
        """How many tokens left, of all sequences."""
        return sum(map(len, self._ids))

    @property
    def all_ended(self) -> bool:
        """Whether no sequence wants another token."""
        return len(self._finished | self._stopped) == len(self._next)

    @property
    def all_finished(self) -> bool:
        """Whether every sequence ended by itself, none by `stop`."""
        return len(self._finished) == len(self._next)

    def is_stopped(self, sequence: int) -> bool:
        """Whether `stop` ended the sequence."""
        return sequence in self._stopped

    def add(self, token: TokenOutput) -> list[TokenOutput]:
        """Take one token and return those that may leave now."""
        sequence = token.sequence
        if not 0 <= sequence < len(self._next) or self._ended(sequence) or token.index < self._next[sequence]:
            return []
        self._early[sequence].setdefault(token.index, token)
        return self._release(sequence)

    def stop(self, sequence: int) -> bool:
        """End a sequence from this side; return whether it was still open."""
        if self._ended(sequence):
            return False
        self._stopped.add(sequence)
        self._early[sequence].clear()
        return True

    def forget_early(self) -> None:
        """Drop what is held: another attempt makes it again."""
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
    """How likely the tokens of one prompt are. Told chunk by chunk, anew in every attempt; each leaves once."""

    def __init__(self) -> None:
        self._next = 0

    def add(self, part: PromptLogprobs) -> PromptLogprobs | None:
        """Return what of `part` has not left yet, if any. Raises InternalError if something before it is missing."""
        known = self._next - part.start
        if known < 0:
            raise InternalError(f"log probabilities of prompt token {part.start} came before those of {self._next}")
        if known >= len(part.tokens):
            return None
        self._next = part.start + len(part.tokens)
        return PromptLogprobs(part.prompt_id, part.start + known, part.tokens[known:])
