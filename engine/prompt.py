"""One prompt in the engine: its stem computes it once, then it is forked into its sequences.

waiting --start--> stem computes the prompt --fork--> live sequences generate, sharing the prompt's blocks
   ^                        |                               |
   |                        +--hold--> stem keeps the prompt's blocks until they are released
   +---------------drop to token ids, or swap out to copies of its blocks (preemption.py)
"""

from array import array
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

from engine.beam_search import describe
from engine.beams import Beams
from engine.finish import finish_of
from engine.grammar.interface import Grammar
from engine.grid_positions import GridPositions
from engine.kv.blocks import BlockPool
from engine.pooling.collected import Collected
from engine.prefix import BlockName, PrefixChain
from engine.prompt_images import PromptImages
from engine.sequence import Sequence
from engine.thinking import ThinkingMatcher
from engine.whole_images import Span
from wire.types import Beam, FinishReason, PromptState, TokenOutput


@dataclass(slots=True, eq=False)
class ScheduledTokens:
    """Tokens of one sequence that can be computed next; at the sequence's end, each of `sampled` gets a token.

    The batch state sets the first token (`start`), how many are in this step (`count`), and whether the sequence is
    then fully computed (`reaches_end`).
    """

    prompt: "Prompt"
    sequence: Sequence
    sampled: tuple[int, ...]
    start: int = 0
    count: int = 0
    reaches_end: bool = False

    @property
    def num_served(self) -> int:
        """Tokens of the prompt that are computed, and tokens that are sampled."""
        computed = self.count if self.sequence is self.prompt.stem else 0
        return computed + (len(self.sampled) if self.reaches_end else 0)


@dataclass(slots=True, eq=False)
class Prompt:
    """Mutable, owned by the core. `age` orders prompts: the lower, the older. All times are by the core's clock.

    The lower its `turn`, the earlier it is served: probes first, then by age.
    `chain` names the blocks of the prompt's tokens; the KV of the first `num_cached` was cached at the first start.
    With `beams`, `sequences` are the hypotheses emitted at the end, and the beams compute in their place.
    `images` has the embeddings of its images, None for a prompt without any and for one that was computed elsewhere.
    `positions` are those of its tokens, None if each is the token's index; `spans` are images that no chunk may cut.
    `is_bound`: a grammar or a rule for thinking constrains its sequences. After its first output token the prompt was
    swapped out `num_swaps` times, and dropped to its token ids `num_rebuilds` times.
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
    images: PromptImages | None = None
    positions: GridPositions | None = None
    spans: tuple[Span, ...] = ()
    is_bound: bool = False
    num_swaps: int = 0
    num_rebuilds: int = 0
    turn: tuple[bool, int] = field(init=False)

    def __post_init__(self) -> None:
        self.turn = not self.state.probe, self.age

    @classmethod
    def of(cls, state: PromptState, *, age: int, hold: bool, max_model_len: int, chain: PrefixChain) -> "Prompt":
        """Return the prompt ready to queue; a sequence that its outputs already finish has its `finish` set."""
        outputs = state.outputs + ((),) * (state.params.num_sequences - len(state.outputs))
        sequences = tuple(Sequence([*state.token_ids, *done], len(state.token_ids), chain) for done in outputs)
        for sequence in sequences:
            finished = finish_of(
                sequence.outputs, state.params, prompt_length=sequence.prompt_length, max_model_len=max_model_len
            )
            sequence.finish = finished[0] if finished else None
        prompt = cls(state, age, hold, sequences, _stem_of(state, chain), chain)
        if state.pooling is not None:
            prompt.collected = Collected(state.pooling)
        if state.params.beam_search is not None:
            prompt.beams = Beams.of(state, chain, max_model_len=max_model_len)
        return prompt

    def bind(self, grammar: Grammar | None) -> None:
        """Constrain each live sequence by `grammar` and by the rule for its thinking, if there are any.

        Raises InvalidGrammar if they do not allow the outputs so far.
        """
        params = self.state.params
        self.is_bound = grammar is not None or params.thinking is not None
        for sequence in self.live if self.is_bound else ():
            matcher = None if grammar is None else grammar.matcher(params.stop_token_ids)
            if params.thinking is not None:
                matcher = ThinkingMatcher(params.thinking, matcher)
            sequence.matcher = matcher
            if matcher is not None:
                matcher.replay(sequence.outputs)

    @property
    def live(self) -> list[Sequence]:
        """Unfinished sequences; with beam search the live beams, none before its first step."""
        if self.beams is not None:
            return self.beams.sequences
        return [sequence for sequence in self.sequences if sequence.finish is None]

    @property
    def num_seqs(self) -> int:
        """How many sequences it may have in one step."""
        waits = self.beams is not None and not self.beams.has_begun
        return self.state.params.width if waits else len(self.live)

    def sampled(self, index: int) -> Sequence:
        """Return the sequence for an index in `ScheduledTokens.sampled`: a beam once the search has begun."""
        begun = self.beams is not None and self.beams.has_begun
        return self.live[index] if begun else self.sequences[index]

    @property
    def ended(self) -> bool:
        """Whether every sequence has ended."""
        return all(sequence.finish is not None for sequence in self.sequences)

    @property
    def uncomputed_tokens(self) -> int:
        """Prompt tokens whose KV is not computed yet. Safe from any thread."""
        stem = self.stem
        return stem.remaining if stem is not None else 0

    @property
    def unlaunched_tokens(self) -> int:
        """Prompt tokens whose KV is neither computed nor pending."""
        return self.stem.unlaunched if self.stem is not None else 0

    @property
    def has_outputs(self) -> bool:
        """Whether any sequence or beam has an output token."""
        return any(sequence.num_outputs for sequence in (*self.sequences, *self.live))

    @property
    def can_be_rebuilt(self) -> bool:
        """Whether its tokens can be computed here again: False if it has images and their embeddings are elsewhere."""
        return self.images is not None or not self.state.images

    @property
    def num_interruptions(self) -> int:
        """How often it was preempted after its first output token."""
        return self.num_swaps + self.num_rebuilds

    @property
    def described(self) -> PromptState:
        """The prompt with its outputs so far."""
        if self.beams is not None:
            return replace(self.state, beams=describe(self.beams.search))
        return replace(self.state, outputs=tuple(sequence.outputs for sequence in self.sequences))

    def to_schedule(self) -> list[ScheduledTokens]:
        """Return what can be computed next: the stem's tokens while there is one, else each live sequence's."""
        if self.stem is not None:
            return [ScheduledTokens(self, self.stem, self._first_wanted())] if self.stem.unlaunched else []
        if self.beams is not None:  # a beam with its candidates waits for the others
            return [ScheduledTokens(self, beam, (i,)) for i, beam in enumerate(self.beams.sequences) if beam.remaining]
        return [ScheduledTokens(self, one, (i,)) for i, one in enumerate(self.sequences) if one.finish is None]

    @property
    def uses_cache(self) -> bool:
        """Whether cached KV may be used: not if all prompt tokens must be computed (pooling, prompt logprobs)."""
        pools = self.collected is None or self.collected.uses_cache
        return pools and self.state.params.prompt_logprobs is None

    @property
    def prefix(self) -> list[BlockName]:
        """The names of the blocks to look up in the prefix cache, at the start or in place of swapped-out copies."""
        if self.is_swapped_out:
            first = self.holders[0]
            return first.chain.names(first.token_ids, first.num_computed)
        return self.stem.prefix if self.stem is not None and self.uses_cache else []

    @property
    def holders(self) -> list[Sequence]:
        """The sequences that hold blocks, or copies if preempted: the stem while there is one, else the live ones."""
        return self.live if self.stem is None else [self.stem]

    @property
    def is_swapped_out(self) -> bool:
        """Whether copies of its blocks are in the swap area."""
        return any(sequence.saved is not None for sequence in self.holders)

    def num_own_blocks(self, block_size: int) -> int:
        """Return how many blocks the stem takes at the start: all of the prompt's; 0 once it has forked."""
        return 0 if self.stem is None else -(-len(self.stem.token_ids) // block_size)

    def start(self, blocks: BlockPool, block_size: int, now: float) -> None:
        """Take all blocks of the prompt, starting with cached ones. Raises NoCapacity, with nothing changed."""
        assert self.stem is not None, "a prompt starts with its stem"
        num_blocks = self.num_own_blocks(block_size)
        self.stem.take(num_blocks, blocks, uses_cache=self.uses_cache, probe=self.state.probe)
        if self.started_at is None:
            self.started_at, self.num_cached = now, self.stem.num_cached

    def receive(self, block_ids: Many[int], blocks: BlockPool) -> None:
        """Take over references to blocks that hold the prompt's complete, verified KV, and fork."""
        assert self.stem is not None, "a prompt is received before it starts"
        self.stem.block_ids = array("i", block_ids)
        self.stem.advance(self.stem.remaining, blocks)
        self.fork(blocks)

    def fork(self, blocks: BlockPool) -> None:
        """Let every live sequence share the blocks of the completed prompt; the stem is removed."""
        assert self.stem is not None, "a prompt forks once"
        for sequence in self.live:
            sequence.share(self.stem, blocks)
        self.stem.drop(blocks)
        self.stem = None

    def drop(self, blocks: BlockPool) -> None:
        """Release every block; keep the token ids and a new stem that computes them again."""
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

    def finish_hypotheses(self) -> list[TokenOutput]:
        """Finish each live sequence with a hypothesis, or with no tokens if there are too few; return the tokens."""
        assert self.beams is not None, "only a search has hypotheses"
        outputs: list[TokenOutput] = []
        winners, prompt_id = self.beams.winners, self.state.prompt_id
        for index, sequence in enumerate(self.sequences):
            if sequence.finish is not None:  # cancelled
                continue
            beam = winners[index] if index < len(winners) else Beam((), 0.0)
            stopped = beam.stop_token_id is not None
            sequence.finish = FinishReason.STOP if stopped else FinishReason.LENGTH
            token_ids: Many[int | None] = beam.token_ids or (None,)
            described = beam.logprobs or (None,) * len(token_ids)
            outputs.extend(
                TokenOutput(prompt_id, index, i, token_id, logprobs=logprobs)
                for i, (token_id, logprobs) in enumerate(zip(token_ids, described, strict=True))
            )
            outputs[-1].finish, outputs[-1].stop_token_id = sequence.finish, beam.stop_token_id
        return outputs

    def cancel(self, index: int, blocks: BlockPool) -> TokenOutput:
        """End the live sequence `index` and release its blocks."""
        sequence = self.sequences[index]
        sequence.finish = FinishReason.CANCELLED
        sequence.drop(blocks)
        return TokenOutput(self.state.prompt_id, index, sequence.num_outputs, None, FinishReason.CANCELLED)

    def _first_wanted(self) -> tuple[int, ...]:
        """Return the sequences that get a token when the prompt is computed; for beams only one, whose row starts all.

        A held prompt is sent to its receiver with all sequences, so even a cancelled sequence gets its first token.
        """
        if self.collected is not None:
            return ()
        if self.beams is not None:
            return () if self.beams.has_begun else (0,)
        wants = (one.num_outputs == 0 and (self.hold or one.finish is None) for one in self.sequences)
        return tuple(i for i, wanted in enumerate(wants) if wanted)


def _stem_of(state: PromptState, chain: PrefixChain) -> Sequence:
    return Sequence(list(state.token_ids), len(state.token_ids), chain)
