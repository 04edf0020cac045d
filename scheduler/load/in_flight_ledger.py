"""What the scheduler has assigned to one instance and the instance's load does not include yet."""

from collections.abc import Callable, Iterable, KeysView, Mapping
from dataclasses import dataclass

from scheduler.load.loads import HeldPrompts, PromptFacts
from scheduler.load.prefixes import Chain, Prefixes
from wire.load import LoadSnapshot

_LOADS_UNTIL_SEEN = 2
"""A snapshot may have been taken while our command was in transit; the next one includes the prompt."""


@dataclass(slots=True)
class _Prompt:
    """What one prompt uses of the instance.

    `tokens` are to be prefilled; `unseen` are those of them that no snapshot can include yet: unsent, or just sent.
    `handed_blocks` hold the KV of `handed_sequences` until it is handed off to `receiver`. `booked_blocks` are those
    of a reservation's `whole_blocks` that are not shared with running prompts; `sequences` are those in transit.
    """

    chain: Chain
    tokens: int = 0
    unseen: int = 0
    receiver: int = 0
    handed_blocks: int = 0
    handed_sequences: int = 0
    booked_blocks: int = 0
    whole_blocks: int = 0
    sequences: int = 0


class InFlightLedger:
    """Prompt tokens assigned to one instance and blocks booked for reservations on it. Path objects update it.

    Prompts that were never registered, such as probes, use nothing. The blocks of a prompt to be handed off count
    from its assignment until its hand-off: only the instance knows what else it is using.
    """

    def __init__(self, load: LoadSnapshot, changed: Callable[[], None], *, block_size: int = 1) -> None:
        self.load = load
        self.version = 0  # counts the changes: placement's view of the instance is made once for each
        self._block_size = block_size
        self._changed = changed
        self._prompts: dict[str, _Prompt] = {}
        self._tokens = self._unseen = self._handed_blocks = self._booked_blocks = self._sequences = 0  # of all prompts
        self._num_snapshots: dict[str, int] = {}  # since the prefill was sent
        self._with_images: dict[str, int] = {}
        self._held: dict[str, _Prompt] = {}
        self._reserved: set[str] = set()
        self._kept_blocks: dict[str, int] = {}
        self._kept_snapshots: dict[str, int] = {}
        self._freed_blocks = 0
        self._full = False
        self._prefixes = Prefixes(load.blocks_total * block_size)

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens assigned but not prefilled: our count, or, if less, the instance's plus the unseen ones."""
        return min(self._tokens, self.load.uncomputed_tokens + self._unseen)

    @property
    def encoding_tokens(self) -> int:
        """Tokens of the newest prompt with images: while these are encoded, another prompt fits into the next step."""
        return next(reversed(self._with_images.values()), 0)

    @property
    def blocks_free(self) -> int:
        """Free blocks minus pending reservations; 0 after a refusal, until the next snapshot."""
        if self._full:
            return 0
        handed = self._handed_blocks + sum(self._kept_blocks.values())
        used = max(self.load.blocks_used - self._freed_blocks, handed)
        return self.load.blocks_total - used - self._booked_blocks

    @property
    def held_for(self) -> Mapping[int, HeldPrompts]:
        """Finished KV that is waiting for a receiver, by the receiver's index."""
        held: dict[int, HeldPrompts] = {}
        for prompt in self._held.values():
            before = held.get(prompt.receiver, HeldPrompts())
            tokens = before.tokens + prompt.handed_blocks * self._block_size
            held[prompt.receiver] = HeldPrompts(before.sequences + prompt.handed_sequences, tokens)
        return held

    @property
    def sequences(self) -> int:
        """Sequences running, waiting or in transit."""
        return self.load.running + self.load.waiting + self._sequences

    @property
    def streams(self) -> int:
        """Sequences decoded in each step, and those in transit."""
        return self.load.decoding + self._sequences

    @property
    def arriving(self) -> int:
        """Sequences of hand-offs in transit: booked on this instance, with their prompts computed on others."""
        if not self._sequences:
            return 0
        return sum(prompt.sequences for prompt in self._prompts.values() if not prompt.tokens)

    @property
    def prompt_ids(self) -> KeysView[str]:
        """The prompts assigned to this instance, including those in transit."""
        return self._prompts.keys()

    def may_have(self, chain: Chain) -> bool:
        """Whether the instance may have the beginning of a prompt with a non-empty chain: known or shared tokens."""
        return self._prefixes.may_have(chain) and self._caches

    def tokens_known(self, chain: Chain) -> int:
        """Return how many leading tokens of a prompt the instance has probably cached."""
        return self._prefixes.tokens_known(chain) if self._caches else 0

    def tokens_shared(self, chain: Chain) -> int:
        """Return how many leading tokens are in blocks of prompts generating there: these tokens need no free block."""
        return self._prefixes.tokens_running(chain) if self._caches else 0

    def register(self, prompt_id: str, chain: Chain) -> None:
        """Register a prompt about to be assigned."""
        self._prompts[prompt_id] = _Prompt(chain)

    def finished(self, prompt_id: str, chains: Iterable[Chain]) -> None:
        """Record a prompt's success. If it generated here, the KV of `chains`, outputs included, is here too."""
        if self._prefixes.runs(prompt_id):
            for chain in chains:
                self._prefixes.note(chain)

    def assign_prefill(self, prompt_id: str, num_tokens: int, *, has_images: bool = False) -> None:
        """Count the tokens not cached of a prompt about to be sent; with images it counts until it is computed.

        The instance's snapshots include a prompt with images only after the images are encoded.
        """
        self.version += 1
        prompt = self._prompts[prompt_id]
        self._drop_tokens(prompt_id, prompt)
        prompt.tokens = prompt.unseen = tokens = max(1, num_tokens - self.tokens_known(prompt.chain))
        self._tokens += tokens
        self._unseen += tokens
        if has_images:
            self._with_images[prompt_id] = tokens

    def assign_hand_off(self, prompt_id: str, facts: PromptFacts, receiver: int) -> None:
        """Count a prompt about to be sent for prefill, whose KV will be sent to `receiver`."""
        self.assign_prefill(prompt_id, facts.num_tokens, has_images=facts.has_images)
        prompt = self._prompts[prompt_id]
        self._drop_handed(prompt_id, prompt)
        prompt.receiver, prompt.handed_sequences = receiver, facts.num_sequences
        prompt.handed_blocks = -(-facts.num_tokens // self._block_size)
        self._handed_blocks += prompt.handed_blocks

    def unassign(self, prompt_id: str) -> None:
        """Release the prompt's tokens and blocks for other prompts, until it is assigned again."""
        self.version += 1
        if prompt := self._prompts.get(prompt_id):
            self._drop_tokens(prompt_id, prompt)
            self._drop_handed(prompt_id, prompt)
        self._changed()

    def prefill_sent(self, prompt_id: str) -> None:
        """Record that the prefill command was sent."""
        if (prompt := self._prompts.get(prompt_id)) and prompt.unseen and prompt_id not in self._with_images:
            self._num_snapshots.setdefault(prompt_id, 0)

    def book_blocks(self, prompt_id: str, blocks: int, sequences: int) -> None:
        """Book sequences, and blocks without those shared with running prompts, before requesting a reservation."""
        self.version += 1
        prompt = self._prompts[prompt_id]
        self._sequences += sequences - prompt.sequences
        prompt.whole_blocks, prompt.sequences = blocks, sequences
        self._book(prompt, blocks - self.tokens_shared(prompt.chain) // self._block_size)

    def reserved(self, prompt_id: str, held_tokens: int | None = None) -> None:
        """Record a granted reservation, which the next snapshot includes; `held_tokens` were cached on the instance."""
        self.version += 1
        if (prompt := self._prompts.get(prompt_id)) and prompt.whole_blocks:
            self._reserved.add(prompt_id)
            if held_tokens is not None:
                unshared = prompt.whole_blocks - held_tokens // self._block_size
                self._book(prompt, max(prompt.booked_blocks, unshared))

    def refused(self) -> None:
        """Assign nothing more to the instance, which had no room, until its next snapshot."""
        self.version += 1
        self._full = True

    def decoding(self, prompt_id: str) -> None:
        """Record that the prompt's sequences are running: the instance counts them, and others may share its blocks."""
        self.version += 1
        if prompt := self._prompts.get(prompt_id):
            self._prefixes.run(prompt_id, prompt.chain)
            self._sequences -= prompt.sequences
            prompt.sequences = 0

    def prefilled(self, prompt_id: str) -> None:
        """Record that the prompt's first tokens have arrived."""
        self.version += 1
        if (prompt := self._prompts.get(prompt_id)) and prompt.tokens:
            self._drop_tokens(prompt_id, prompt)
            self._prefixes.note(prompt.chain)
            if prompt.handed_blocks:
                self._held[prompt_id] = prompt
            self._changed()

    def handed_off(self, prompt_id: str) -> None:
        """Record that the prompt's KV was sent and its blocks are free."""
        self.version += 1
        if prompt := self._prompts.get(prompt_id):
            self._drop_tokens(prompt_id, prompt)
            self._freed_blocks += self._drop_handed(prompt_id, prompt)
        self._changed()

    def keep(self, prompt_id: str) -> None:
        """Record that held KV stays although nothing will fetch it: its blocks are used until the instance frees them.

        They count here until a snapshot includes them.
        """
        if prompt := self._held.get(prompt_id):
            self._kept_blocks[prompt_id] = self._drop_handed(prompt_id, prompt)
            self._kept_snapshots[prompt_id] = 0

    def drop(self, prompt_id: str) -> None:
        """Remove the prompt from this instance. Idempotent."""
        self.version += 1
        if prompt := self._prompts.pop(prompt_id, None):
            self._drop_tokens(prompt_id, prompt)
            self._freed_blocks += self._drop_handed(prompt_id, prompt)
            self._drop_booked(prompt_id, prompt)
            self._sequences -= prompt.sequences
            self._prefixes.end(prompt_id)
        self._changed()

    def update(self, load: LoadSnapshot) -> None:
        """Replace the load snapshot."""
        self.version += 1
        self.load = load
        self._full = False
        self._freed_blocks = 0
        for prompt_id in tuple(self._reserved):
            self._drop_booked(prompt_id, self._prompts[prompt_id])
        for prompt_id in _counted(self._num_snapshots):
            prompt = self._prompts[prompt_id]
            self._unseen -= prompt.unseen
            prompt.unseen = 0
        for prompt_id in _counted(self._kept_snapshots):
            del self._kept_blocks[prompt_id]
        self._changed()

    @property
    def _caches(self) -> bool:
        """Whether the instance ever looked up a prefix: with its prefix cache off it never does."""
        return self.load.prefix_tokens_sought > 0

    def _book(self, prompt: _Prompt, blocks: int) -> None:
        self._booked_blocks += blocks - prompt.booked_blocks
        prompt.booked_blocks = blocks

    def _drop_tokens(self, prompt_id: str, prompt: _Prompt) -> None:
        if prompt.tokens:
            self._tokens -= prompt.tokens
            self._unseen -= prompt.unseen
            prompt.tokens = prompt.unseen = 0
            self._num_snapshots.pop(prompt_id, None)
            self._with_images.pop(prompt_id, None)

    def _drop_handed(self, prompt_id: str, prompt: _Prompt) -> int:
        """Remove the prompt from those to be handed off; return the blocks it had."""
        blocks = prompt.handed_blocks
        if blocks:
            self._handed_blocks -= blocks
            prompt.handed_blocks = 0
            self._held.pop(prompt_id, None)
        return blocks

    def _drop_booked(self, prompt_id: str, prompt: _Prompt) -> None:
        if prompt.whole_blocks:
            self._book(prompt, 0)
            prompt.whole_blocks = 0
            self._reserved.discard(prompt_id)


def _counted(num_snapshots: dict[str, int]) -> list[str]:
    """Count a snapshot for each prompt; remove and return those that the instance's load includes by now."""
    for prompt_id in num_snapshots:
        num_snapshots[prompt_id] += 1
    counted = [prompt_id for prompt_id, number in num_snapshots.items() if number >= _LOADS_UNTIL_SEEN]
    for prompt_id in counted:
        del num_snapshots[prompt_id]
    return counted
