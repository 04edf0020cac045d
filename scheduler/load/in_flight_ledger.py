"""What the scheduler has assigned to one instance and the instance's load does not include yet."""

from collections.abc import Callable, Iterable, KeysView, Mapping
from dataclasses import dataclass

from scheduler.load.counts import PromptCounts
from scheduler.load.loads import HeldPrompts
from scheduler.load.prefixes import Chain, Prefixes
from wire.load import LoadSnapshot

_LOADS_UNTIL_SEEN = 2
"""A snapshot may have been taken while our command was in transit; the next one includes the prompt."""


@dataclass(slots=True)
class _AssignedPrompt:
    """A prompt assigned for prefill with `receiver`; it uses blocks on the prefill instance until it is handed off."""

    receiver: int
    blocks: int
    sequences: int


class InFlightLedger:
    """Prompt tokens assigned to one instance and blocks booked for reservations on it. Path objects update it.

    The blocks of a prompt to be handed off count from its assignment until its hand-off: only the instance knows what
    else it is using.
    """

    def __init__(self, load: LoadSnapshot, changed: Callable[[], None], *, block_size: int = 1) -> None:
        self.load = load
        self.version = 0  # counts the changes: placement's view of the instance is made once for each
        self._block_size = block_size
        self._assigned: dict[str, _AssignedPrompt] = {}
        self._freed_blocks = 0
        self._changed = changed
        self._assigned_blocks = PromptCounts()
        self._held: dict[str, _AssignedPrompt] = {}
        self._kept_blocks = PromptCounts()
        self._kept_snapshots: dict[str, int] = {}
        self._tokens = PromptCounts()
        self._unseen = PromptCounts()  # those that no snapshot can include yet: not sent, or just sent
        self._num_snapshots: dict[str, int] = {}
        self._blocks = PromptCounts()
        self._whole: dict[str, int] = {}
        self._chains: dict[str, Chain] = {}
        self._prefixes = Prefixes(load.blocks_total * block_size)
        self._sequences = PromptCounts()
        self._reserved: set[str] = set()
        self._full = False

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens assigned but not prefilled: our count, or the instance's plus what it cannot have counted."""
        return min(self._tokens.total, self.load.uncomputed_tokens + self._unseen.total)

    @property
    def blocks_free(self) -> int:
        """Free blocks minus pending reservations; 0 after a refusal, until the next snapshot."""
        if self._full:
            return 0
        assigned = self._assigned_blocks.total + self._kept_blocks.total
        used = max(self.load.blocks_used - self._freed_blocks, assigned)
        return self.load.blocks_total - used - self._blocks.total

    @property
    def held_for(self) -> Mapping[int, HeldPrompts]:
        """Finished KV that is waiting for a receiver, by the receiver's index."""
        held: dict[int, HeldPrompts] = {}
        for prompt in self._held.values():
            before = held.get(prompt.receiver, HeldPrompts())
            tokens = before.tokens + prompt.blocks * self._block_size
            held[prompt.receiver] = HeldPrompts(before.sequences + prompt.sequences, tokens)
        return held

    @property
    def sequences(self) -> int:
        """Sequences running, waiting or in transit."""
        return self.load.running + self.load.waiting + self._sequences.total

    @property
    def streams(self) -> int:
        """Sequences decoded in each step, and those in transit."""
        return self.load.decoding + self._sequences.total

    @property
    def prompt_ids(self) -> KeysView[str]:
        """The prompts assigned to this instance, including those in transit."""
        return self._chains.keys()

    def tokens_known(self, chain: Chain) -> int:
        """Return how many leading tokens of a prompt the instance has probably cached."""
        return self._prefixes.tokens_known(chain) if self._caches else 0

    def tokens_shared(self, chain: Chain) -> int:
        """Return how many leading tokens are in blocks of prompts generating there: they need no free block."""
        return self._prefixes.tokens_running(chain) if self._caches else 0

    def register(self, prompt_id: str, chain: Chain) -> None:
        """Register the chain of a prompt about to be assigned."""
        self._chains[prompt_id] = chain

    def finished(self, prompt_id: str, chains: Iterable[Chain]) -> None:
        """Record a prompt's success. If it generated here, the KV of all these chains, outputs included, is here."""
        if self._prefixes.runs(prompt_id):
            for chain in chains:
                self._prefixes.note(chain)

    def assign_prefill(self, prompt_id: str, num_tokens: int) -> None:
        """Count a prompt about to be sent for prefill."""
        self.version += 1
        self._tokens.set(prompt_id, num_tokens)
        self._unseen.set(prompt_id, num_tokens)
        self._num_snapshots.pop(prompt_id, None)

    def assign_hand_off(self, prompt_id: str, num_tokens: int, receiver: int, sequences: int) -> None:
        """Count a prompt about to be sent for prefill, whose KV will be sent to `receiver`."""
        self.assign_prefill(prompt_id, num_tokens)
        blocks = -(-num_tokens // self._block_size)
        self._assigned[prompt_id] = _AssignedPrompt(receiver, blocks, sequences)
        self._assigned_blocks.set(prompt_id, blocks)
        self._held.pop(prompt_id, None)

    def unassign(self, prompt_id: str) -> None:
        """Release the prompt's share of the next step and its blocks for others, until it is assigned again."""
        self.version += 1
        self._drop_tokens(prompt_id)
        self._remove_assigned(prompt_id)
        self._changed()

    def prefill_sent(self, prompt_id: str) -> None:
        """Record that the prefill command was sent."""
        if prompt_id in self._unseen:
            self._num_snapshots.setdefault(prompt_id, 0)

    def book_blocks(self, prompt_id: str, blocks: int, sequences: int) -> None:
        """Book blocks and sequences before requesting a reservation; blocks shared with running prompts are free."""
        self.version += 1
        shared = self.tokens_shared(self._chains.get(prompt_id, ())) // self._block_size
        self._blocks.set(prompt_id, blocks - shared)
        self._whole[prompt_id] = blocks
        self._sequences.set(prompt_id, sequences)

    def reserved(self, prompt_id: str, held_tokens: int | None = None) -> None:
        """Record a granted reservation, which the next snapshot includes; `held_tokens` were cached on the instance."""
        self.version += 1
        self._reserved.add(prompt_id)
        if prompt_id in self._blocks and held_tokens is not None:
            unshared = self._whole[prompt_id] - held_tokens // self._block_size
            self._blocks.set(prompt_id, max(self._blocks.of(prompt_id), unshared))

    def refused(self) -> None:
        """Assign nothing more to the instance, which had no room, until its next snapshot."""
        self.version += 1
        self._full = True

    def decoding(self, prompt_id: str) -> None:
        """Record that the prompt's sequences are running: the instance counts them, and others may share its blocks."""
        self.version += 1
        self._prefixes.run(prompt_id, self._chains.get(prompt_id, ()))
        self._sequences.drop(prompt_id)

    def prefilled(self, prompt_id: str) -> None:
        """Record that the prompt's first tokens have arrived."""
        self.version += 1
        if prompt_id in self._tokens:
            self._drop_tokens(prompt_id)
            self._prefixes.note(self._chains.get(prompt_id, ()))
            if prompt_id in self._assigned:
                self._held[prompt_id] = self._assigned[prompt_id]
            self._changed()

    def handed_off(self, prompt_id: str) -> None:
        """Record that the prompt's KV was sent and its blocks are free."""
        self.version += 1
        self._drop_tokens(prompt_id)
        self._drop_assigned(prompt_id)
        self._changed()

    def keep(self, prompt_id: str) -> None:
        """Record that held KV stays although nothing will fetch it: its blocks are used until the instance frees them.

        They count here until a snapshot includes them.
        """
        if prompt_id in self._held:
            self._kept_blocks.set(prompt_id, self._remove_assigned(prompt_id))
            self._kept_snapshots[prompt_id] = 0

    def drop(self, prompt_id: str) -> None:
        """Remove the prompt from this instance. Idempotent."""
        self.version += 1
        self._drop_tokens(prompt_id)
        self._drop_assigned(prompt_id)
        self._drop_blocks(prompt_id)
        self._sequences.drop(prompt_id)
        self._chains.pop(prompt_id, None)
        self._prefixes.end(prompt_id)
        self._changed()

    def update(self, load: LoadSnapshot) -> None:
        """Replace the load snapshot."""
        self.version += 1
        self.load = load
        self._full = False
        self._freed_blocks = 0
        for prompt_id in tuple(self._reserved):
            self._drop_blocks(prompt_id)
        for prompt_id in _counted(self._num_snapshots):
            self._unseen.drop(prompt_id)
        for prompt_id in _counted(self._kept_snapshots):
            self._kept_blocks.drop(prompt_id)
        self._changed()

    @property
    def _caches(self) -> bool:
        """Whether it ever looked up a prefix: with its cache off it never does."""
        return self.load.prefix_tokens_sought > 0

    def _drop_tokens(self, prompt_id: str) -> None:
        self._tokens.drop(prompt_id)
        self._unseen.drop(prompt_id)
        self._num_snapshots.pop(prompt_id, None)

    def _drop_assigned(self, prompt_id: str) -> None:
        self._freed_blocks += self._remove_assigned(prompt_id)

    def _remove_assigned(self, prompt_id: str) -> int:
        """Remove the prompt from those to be handed off; return the blocks it had."""
        self._assigned.pop(prompt_id, None)
        self._held.pop(prompt_id, None)
        return self._assigned_blocks.drop(prompt_id)

    def _drop_blocks(self, prompt_id: str) -> None:
        self._blocks.drop(prompt_id)
        self._whole.pop(prompt_id, None)
        self._reserved.discard(prompt_id)


def _counted(num_snapshots: dict[str, int]) -> list[str]:
    """Count a snapshot for each prompt; remove and return those that the instance's load includes by now."""
    for prompt_id in num_snapshots:
        num_snapshots[prompt_id] += 1
    counted = [prompt_id for prompt_id, number in num_snapshots.items() if number >= _LOADS_UNTIL_SEEN]
    for prompt_id in counted:
        del num_snapshots[prompt_id]
    return counted
