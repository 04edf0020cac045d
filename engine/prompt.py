"""One prompt inside the engine: computed once by its stem, then forked into its sequences.

waiting --start--> stem computes the prompt --fork--> live sequences generate, sharing the prompt's blocks
   ^                        |                               |
   |                        +--hold--> stem keeps the prompt's blocks until they are released
   +---------------drop, or put aside (preemption.py: back to token ids, or to copies of its blocks)
"""

from array import array
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

from engine.beam_search import describe
from engine.beams import Beams
from engine.finish import finish_of
from engine.grammar.interface import Grammar
from engine.kv.blocks import BlockPool
from engine.pooling.collected import Collected
from engine.prefix import BlockName, PrefixChain
from engine.sequence import Sequence
from wire.types import Beam, FinishReason, PromptState, TokenOutput


@dataclass(slots=True, eq=False)
class ScheduledTokens:
    """What a prompt can compute next: tokens of a sequence; at its end the sequences `sampled` get a token each.

    The roster says from which token on (`start`) and how many in this step (`count`), and whether nothing of the
    sequence is left then (`reaches_end`).
    """

    prompt: "Prompt"
    sequence: Sequence
    sampled: tuple[int, ...]
    start: int = 0
    count: int = 0
    reaches_end: bool = False


@dataclass(slots=True, eq=False)
class Prompt:
    """Mutable, owned by the core. `age` orders prompts: the lower, the older. Times are readings of one clock.

    The lower its `turn`, the earlier it is served: probes first, then by age.
    `chain` names the blocks of the prompt's tokens; the KV of the first `num_cached` was there at the first start.
    With `beams` the sequences are the hypotheses that are told in the end, and the beams compute in their place.
    `is_bound`: a grammar decides what its sequences may be. Between two of its tokens it was put aside as copies
    `num_swaps` times, and `num_rebuilds` times as its token ids.
    """

    state: PromptState
    age: int
    hold: bool
    sequences: tuple[Sequence, ...]
    stem: Sequence | None
    chain: PrefixChain
    num_cached: int = 0
    started_at: float | None = None
    admitted_at: float | None = None
    beams: Beams | None = None
    collected: Collected | None = None
    is_bound: bool = False
    num_swaps: int = 0
    num_rebuilds: int = 0
    turn: tuple[bool, int] = field(init=False)

    def __post_init__(self) -> None:
        self.turn = not self.state.probe, self.age

    @classmethod
    def of(cls, state: PromptState, *, age: int, hold: bool, max_model_len: int, chain: PrefixChain) -> "Prompt":
        """Make the prompt as it waits; sequences that its outputs have finished are marked so."""
        outputs = state.outputs + ((),) * (state.params.num_sequences - len(state.outputs))
        sequences = tuple(Sequence([*state.token_ids, *done], len(state.token_ids), chain) for done in outputs)
        for sequence in sequences:
            ending = finish_of(
                sequence.outputs, state.params, prompt_length=sequence.prompt_length, max_model_len=max_model_len
            )
            sequence.finish = ending[0] if ending else None
        prompt = cls(state, age, hold, sequences, _stem_of(state, chain), chain)
        if state.pooling is not None:
            prompt.collected = Collected(state.pooling)
        if state.params.beam_search is not None:
            prompt.beams = Beams.of(state, chain, max_model_len=max_model_len)
        return prompt

    def bind(self, grammar: Grammar) -> None:
        """Let `grammar` decide what each sequence may be. Raises InvalidGrammar for outputs that it does not allow."""
        self.is_bound = True
        for sequence in self.live:
            sequence.matcher = grammar.matcher(self.state.params.stop_token_ids)
            sequence.matcher.replay(sequence.outputs)

    @property
    def live(self) -> list[Sequence]:
        """Sequences that compute, or will once the prompt is computed; beams have to be begun to be known."""
        if self.beams is not None:
            return self.beams.sequences
        return [sequence for sequence in self.sequences if sequence.finish is None]

    @property
    def num_seats(self) -> int:
        """Sequences that it may have in one step."""
        waits = self.beams is not None and not self.beams.has_begun
        return self.state.params.width if waits else len(self.live)

    def sampled(self, index: int) -> Sequence:
        """Return the sequence that a run's index means: a beam once they are begun."""
        begun = self.beams is not None and self.beams.has_begun
        return self.live[index] if begun else self.sequences[index]

    @property
    def ended(self) -> bool:
        """Whether every sequence has ended."""
        return all(sequence.finish is not None for sequence in self.sequences)

    @property
    def uncomputed_tokens(self) -> int:
        """Prompt tokens whose KV is still to be computed. Safe from any thread."""
        stem = self.stem
        return stem.remaining if stem is not None else 0

    @property
    def unlaunched_tokens(self) -> int:
        """Prompt tokens whose KV is neither computed nor pending."""
        return self.stem.unlaunched if self.stem is not None else 0

    @property
    def has_outputs(self) -> bool:
        """Whether a token of its answer is known."""
        return any(sequence.num_outputs for sequence in (*self.sequences, *self.live))

    @property
    def num_interruptions(self) -> int:
        """How often it was put aside between two of its tokens."""
        return self.num_swaps + self.num_rebuilds

    @property
    def described(self) -> PromptState:
        """The prompt with its outputs so far."""
        if self.beams is not None:
            return replace(self.state, beams=describe(self.beams.search))
        return replace(self.state, outputs=tuple(sequence.outputs for sequence in self.sequences))

    def pieces(self) -> list[ScheduledTokens]:
        """Return what can be computed: of the stem while there is one, else of each live sequence."""
        if self.stem is not None:
            return [ScheduledTokens(self, self.stem, self._first_wanted())] if self.stem.unlaunched else []
        if self.beams is not None:  # one without tokens waits for the others
            return [ScheduledTokens(self, beam, (i,)) for i, beam in enumerate(self.beams.sequences) if beam.remaining]
        return [ScheduledTokens(self, one, (i,)) for i, one in enumerate(self.sequences) if one.finish is None]

    @property
    def uses_cache(self) -> bool:
        """Whether KV that is there already may stand for the prompt's: not where more of its tokens is wanted."""
        pools = self.collected is None or self.collected.uses_cache
        return pools and self.state.params.prompt_logprobs is None

    @property
    def prefix(self) -> list[BlockName]:
        """The names of the blocks that may be found at the start, or instead of copies put aside."""
        if self.is_aside:
            first = self.holders[0]
            return first.chain.names(first.token_ids, first.num_computed)
        return self.stem.prefix if self.stem is not None and self.uses_cache else []

    @property
    def holders(self) -> list[Sequence]:
        """Those that hold blocks, or their copies, while it runs or is put aside: the stem while there is one."""
        return self.live if self.stem is None else [self.stem]

    @property
    def is_aside(self) -> bool:
        """Whether copies of its blocks wait to come back."""
        return any(sequence.saved is not None for sequence in self.holders)

    def num_own_blocks(self, block_size: int) -> int:
        """Return how many blocks it has at least while it runs: the stem takes all of the prompt at once."""
        return 0 if self.stem is None else -(-len(self.stem.token_ids) // block_size)

    def start(self, blocks: BlockPool, block_size: int, now: float) -> None:
        """Take all blocks of the prompt, those that hold its prefix already first. Raises NoCapacity, unchanged."""
        assert self.stem is not None, "a prompt starts with its stem"
        num_blocks = self.num_own_blocks(block_size)
        self.stem.take(num_blocks, blocks, uses_cache=self.uses_cache, probe=self.state.probe)
        if self.started_at is None:
            self.started_at, self.num_cached = now, self.stem.num_cached

    def receive(self, block_ids: Many[int], blocks: BlockPool) -> None:
        """The prompt's KV, whole and verified, lies in these blocks, whose references come with it."""
        assert self.stem is not None, "a prompt is received before it starts"
        self.stem.block_ids = array("i", block_ids)
        self.stem.advance(self.stem.remaining, blocks)
        self.fork(blocks)

    def fork(self, blocks: BlockPool) -> None:
        """The prompt's KV is whole: every live sequence shares its blocks, the stem is done."""
        assert self.stem is not None, "a prompt forks once"
        for sequence in self.live:
            sequence.share(self.stem, blocks)
        self.stem.drop(blocks)
        self.stem = None

    def drop(self, blocks: BlockPool) -> None:
        """Release every block; what is left are token ids, and a fresh stem to compute them again."""
        self.free(blocks)
        if self.beams is not None:
            self.beams.offered.clear()
        if self.collected is not None:
            self.collected.values.clear()
        self.stem = _stem_of(self.state, self.chain)

    def free(self, blocks: BlockPool) -> None:
        """Release every block."""
        for sequence in (*self.sequences, *self.live, *([self.stem] if self.stem else [])):
            sequence.drop(blocks)

    def tell_hypotheses(self) -> list[TokenOutput]:
        """End every sequence with the hypothesis it is, token by token; with none where there were fewer."""
        assert self.beams is not None, "only a search has hypotheses"
        told: list[TokenOutput] = []
        winners, prompt_id = self.beams.winners, self.state.prompt_id
        for index, sequence in enumerate(self.sequences):
            if sequence.finish is not None:  # cancelled
                continue
            beam = winners[index] if index < len(winners) else Beam((), 0.0)
            stopped = beam.stop_token_id is not None
            sequence.finish = FinishReason.STOP if stopped else FinishReason.LENGTH
            *before, last = beam.token_ids or (None,)
            told.extend(TokenOutput(prompt_id, index, i, token_id) for i, token_id in enumerate(before))
            told.append(TokenOutput(prompt_id, index, len(before), last, sequence.finish, beam.stop_token_id))
        return told

    def cancel(self, index: int, blocks: BlockPool) -> TokenOutput:
        """End the live sequence `index` and release its blocks."""
        sequence = self.sequences[index]
        sequence.finish = FinishReason.CANCELLED
        sequence.drop(blocks)
        return TokenOutput(self.state.prompt_id, index, sequence.num_outputs, None, FinishReason.CANCELLED)

    def _first_wanted(self) -> tuple[int, ...]:
        """Return who gets a token when the prompt is computed; one candidate list begins all beams.

        A held prompt is described to its receiver whole, so even a cancelled sequence gets its first token.
        """
        if self.collected is not None:
            return ()
        if self.beams is not None:
            return () if self.beams.has_begun else (0,)
        wants = (one.num_outputs == 0 and (self.hold or one.finish is None) for one in self.sequences)
        return tuple(i for i, wanted in enumerate(wants) if wanted)


def _stem_of(state: PromptState, chain: PrefixChain) -> Sequence:
    return Sequence(list(state.token_ids), len(state.token_ids), chain)
