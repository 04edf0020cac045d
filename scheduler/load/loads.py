"""Input of placement: each living instance's load, and the prompt to place. Plain data and arithmetic."""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from scheduler.load.prefixes import Chain
from wire.cheap_dataclass import cheap_dataclass
from wire.shared_limits import hold_limit
from wire.step_cost import NO_COST, StepCost
from wire.types import Role


@cheap_dataclass(frozen=True, slots=True)
class HeldPrompts:
    """Prompts prefilled but not yet handed off: their sequences, and the tokens that their blocks can contain."""

    sequences: int = 0
    tokens: int = 0


@dataclass(slots=True)  # not frozen, to be created faster: one is made for each instance and decision
class InstanceLoad:
    """One living instance's load for placement: its last snapshot plus what was assigned since.

    `outstanding_tokens` are prompt tokens assigned and not yet prefilled, `encoding_tokens` those of prompts whose
    images may still be in the encoder; `sequences` are running, waiting or booked; `waiting` of them wait on the
    instance: preempted from a full pool, or for their prefill. `held_for` is finished KV waiting for a receiver, by the
    index of the receiver; `no_transport_to` has the receivers to which it cannot hand off, and its own index if it must
    not serve alone. An instance that `is_suspect` has been silent for a while. `path` is how its prompts get to a
    receiver. `streams` are the sequences decoded in each step, or booked to be; chunks are sized to keep the gaps
    between a stream's tokens below `gap_limit_s`. `arriving` are those streams whose hand-off is on its way.
    """

    index: int
    name: str
    role: Role
    outstanding_tokens: int
    prefill_chunk_size: int
    blocks_total: int
    blocks_free: int
    block_size: int
    sequences: int
    waiting: int
    max_num_seqs: int
    held_for: Mapping[int, HeldPrompts] = field(default_factory=dict)
    no_transport_to: Container[int] = ()
    is_suspect: bool = False
    path: str = "handoff"
    streams: int = 0
    arriving: int = 0
    cost: StepCost = NO_COST
    gap_limit_s: float = math.inf
    encoding_tokens: int = 0

    @property
    def can_start(self) -> bool:
        """Whether the running step computes all outstanding tokens, so that a prompt assigned now is in the next step.

        While the images of one prompt are encoded, another prompt may be computed, or have its own images encoded.
        """
        return self.outstanding_tokens - self.encoding_tokens <= self.prefill_chunk_size

    @property
    def pool_tokens(self) -> int:
        """Tokens that fit into the whole pool."""
        return self.blocks_total * self.block_size

    @property
    def held_tokens(self) -> int:
        """Tokens of finished KV waiting for a receiver."""
        return sum(held.tokens for held in self.held_for.values())

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks of this instance `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def blocks_shared(self, prompt: "PromptFacts") -> int:
        """Return how many of the prompt's blocks other prompts already use here: for these it needs no free blocks."""
        return prompt.shared.get(self.index, 0) // self.block_size

    def blocks_for_all(self, prompt: "PromptFacts") -> int:
        """Return the blocks of the prompt and its longest output; full prompt blocks are shared by its sequences.

        The last token of a sequence is never computed, so it needs no slot.
        """
        shared, computed = prompt.num_tokens // self.block_size, prompt.max_tokens - 1
        if computed == 0:
            return self.blocks_for(prompt.num_tokens)
        return shared + prompt.num_sequences * (self.blocks_for(prompt.num_tokens + computed) - shared)


@cheap_dataclass(frozen=True, slots=True)
class PromptFacts:
    """The properties of a prompt that placement uses.

    `avoid` are pairs (prefill index, decode index) on which the prompt failed: pairs, not instances, since perhaps only
    the link failed. They are used again only if no other pair has room for the prompt. A `pooled` prompt generates
    nothing. `chain` are the digests of its prefixes (prefixes.py). By instance index, `known` is how many leading
    tokens are probably cached there, and `shared` how many are in blocks that other prompts use there. `has_images`:
    the prompt is computed once its images are encoded. `expected_outputs` are the tokens that each of its sequences
    will probably have, 0 if paths are not compared; `num_behind` prompts with `tokens_behind` tokens wait in the queue.
    """

    num_tokens: int
    max_tokens: int
    num_sequences: int = 1
    avoid: frozenset[tuple[int | None, int]] = frozenset()
    pooled: bool = False
    chain: Chain = ()
    known: Mapping[int, int] = field(default_factory=dict)
    shared: Mapping[int, int] = field(default_factory=dict)
    expected_outputs: float = 0.0
    num_behind: int = 0
    tokens_behind: int = 0
    has_images: bool = False

    @property
    def prefill_only(self) -> bool:
        """Whether it finishes on the instance that computes it: without a token, or with the first one."""
        return self.pooled or self.max_tokens == 1


@cheap_dataclass(frozen=True, slots=True)
class LinkShare:
    """The limits on one link, so that a slow one leaves the rest of both pools and batch slots to the other links."""

    sequences: int
    tokens: int


def link_share(start: InstanceLoad, decode: InstanceLoad, num_starts: int, num_decodes: int) -> LinkShare:
    """Return the share of the link between two instances among `num_starts` x `num_decodes` links."""
    tokens = min(hold_limit(start.pool_tokens) // num_decodes, hold_limit(decode.pool_tokens) // num_starts)
    return LinkShare(max(1, hold_limit(decode.max_num_seqs) // num_starts), max(1, tokens))
