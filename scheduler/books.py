"""What the scheduler has given one instance and the instance's own figures do not show yet."""

from collections.abc import Callable

from wire.types import LoadSnapshot

_LOADS_UNTIL_SEEN = 2
"""A snapshot may have been made while our command was on its way; the one after it knows the prompt."""


class Books:
    """Prompt tokens given for prefill and blocks booked for reservations of one instance. Written by path objects."""

    def __init__(self, load: LoadSnapshot, changed: Callable[[], None]) -> None:
        self.load = load
        self._changed = changed
        self._tokens: dict[str, int] = {}
        self._unsent: set[str] = set()
        self._fresh: dict[str, int] = {}
        self._blocks: dict[str, int] = {}
        self._sequences: dict[str, int] = {}
        self._reserved: set[str] = set()
        self._full = False

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens given and not yet prefilled: our count, or the instance's plus what it cannot have counted."""
        unseen = sum(self._tokens[prompt_id] for prompt_id in (*self._unsent, *self._fresh))
        return min(sum(self._tokens.values()), self.load.uncomputed_tokens + unseen)

    @property
    def blocks_free(self) -> int:
        """Free blocks less the reservations under way; none after a refusal, until the next snapshot."""
        if self._full:
            return 0
        return self.load.blocks_total - self.load.blocks_used - sum(self._blocks.values())

    @property
    def sequences(self) -> int:
        """Sequences that run, wait or are on their way."""
        return self.load.running + self.load.waiting + sum(self._sequences.values())

    def give_prefill(self, prompt_id: str, num_tokens: int) -> None:
        """A prompt will be sent for prefill."""
        self._tokens[prompt_id] = num_tokens
        self._unsent.add(prompt_id)

    def prefill_sent(self, prompt_id: str) -> None:
        """The command is on its way."""
        if prompt_id in self._unsent:
            self._unsent.discard(prompt_id)
            self._fresh[prompt_id] = 0

    def book_blocks(self, prompt_id: str, blocks: int, sequences: int) -> None:
        """A reservation will be asked for, and its sequences will come."""
        self._blocks[prompt_id] = blocks
        self._sequences[prompt_id] = sequences

    def reserved(self, prompt_id: str) -> None:
        """The reservation stands: the next snapshot holds it."""
        self._reserved.add(prompt_id)

    def refused(self) -> None:
        """The instance had no room after all: give it nothing until its next snapshot."""
        self._full = True

    def decoding(self, prompt_id: str) -> None:
        """The prompt's sequences run: the instance counts them."""
        self._sequences.pop(prompt_id, None)

    def prefilled(self, prompt_id: str) -> None:
        """The prompt's first tokens are in."""
        if prompt_id in self._tokens:
            self._drop_tokens(prompt_id)
            self._changed()

    def drop(self, prompt_id: str) -> None:
        """The prompt is no longer this instance's. Idempotent."""
        self._drop_tokens(prompt_id)
        self._drop_blocks(prompt_id)
        self._sequences.pop(prompt_id, None)
        self._changed()

    def update(self, load: LoadSnapshot) -> None:
        """Take a new snapshot."""
        self.load = load
        self._full = False
        for prompt_id in tuple(self._reserved):
            self._drop_blocks(prompt_id)
        self._fresh = {p: seen + 1 for p, seen in self._fresh.items() if seen + 1 < _LOADS_UNTIL_SEEN}
        self._changed()

    def _drop_tokens(self, prompt_id: str) -> None:
        self._tokens.pop(prompt_id, None)
        self._unsent.discard(prompt_id)
        self._fresh.pop(prompt_id, None)

    def _drop_blocks(self, prompt_id: str) -> None:
        self._blocks.pop(prompt_id, None)
        self._reserved.discard(prompt_id)
