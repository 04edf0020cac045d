"""One token sequence under computation: its tokens, its KV blocks, and how far they are computed."""

from array import array
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import partial

from engine.grammar.interface import Matcher
from engine.kv.blocks import BlockPool
from engine.kv.swap import SavedBlocks
from engine.prefix import BlockName, PrefixChain
from engine.rope_lengths import RopeLengths
from engine.step import BatchSequence, Model
from engine.token_counts import TokenCounts
from wire.errors import InternalError
from wire.types import FinishReason


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable, owned by the core. The KV of tokens [0, num_computed) is in `block_ids`.

    While it runs, num_computed < len(token_ids): a step computes the next tokens, and when it reaches the end, one
    token is sampled. Steps launched and not collected compute the `num_pending` tokens after these, and sample
    `num_awaited` tokens that are not in `token_ids` yet. Without blocks (not started, dropped, ended) it has only token
    ids. The first `num_named` of its blocks are full and in the prefix cache by their names in `chain`; the KV of its
    first `num_cached` tokens came from there, and that of `num_written` was added to it. Swapped out, it has copies in
    `saved` instead of blocks. Its KV is rotated as if its prompt had at least `counted_prompt` tokens
    (rope_lengths.py). Tokens up to `num_writable` have blocks it may write without a check by the pool. With a grammar,
    `matcher` has consumed its outputs and `mask` has the tokens allowed next. `counts` are its token counts, if
    penalties need them.
    """

    token_ids: list[int]
    prompt_length: int
    chain: PrefixChain
    num_computed: int = 0
    num_pending: int = 0
    num_awaited: int = 0
    num_named: int = 0
    num_cached: int = 0
    num_written: int = 0
    num_writable: int = 0
    counted_prompt: int = 0
    block_ids: "array[int]" = field(default_factory=partial(array, "i"))
    saved: SavedBlocks | None = None
    finish: FinishReason | None = None
    matcher: Matcher | None = None
    mask: memoryview | None = None
    counts: TokenCounts | None = None

    @property
    def outputs(self) -> tuple[int, ...]:
        """Output token ids so far."""
        return tuple(self.token_ids[self.prompt_length :])

    @property
    def num_outputs(self) -> int:
        """Output tokens so far; the position of the next one."""
        return len(self.token_ids) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens whose KV must be computed before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_launched(self) -> int:
        """Tokens whose KV is computed or pending: the next step starts after them."""
        return self.num_computed + self.num_pending

    @property
    def unlaunched(self) -> int:
        """Tokens that the next step can compute, including an awaited one; `remaining` while nothing is pending."""
        return len(self.token_ids) + self.num_awaited - self.num_computed - self.num_pending

    def append(self, token_id: int) -> None:
        """Append the sampled token. Raises InternalError if the grammar does not allow it."""
        if self.matcher is not None and self.finish is None and not self.matcher.advance(token_id):
            raise InternalError(f"token {token_id} was sampled, but the grammar does not allow it")
        self.token_ids.append(token_id)

    def take(self, num_blocks: int, blocks: BlockPool, *, uses_cache: bool, probe: bool) -> None:
        """Start with `num_blocks`, using cached prefix blocks first. Raises NoCapacity, with nothing changed.

        At least one token remains to compute: sampling the next one needs its logits.
        """
        prefix = self.prefix if uses_cache else ()
        block_ids, self.num_named = blocks.take(num_blocks, prefix, probe=probe)
        self.block_ids = array("i", block_ids)
        self.num_computed = self.num_cached = self.chain.num_tokens(self.num_named)

    @property
    def prefix(self) -> list[BlockName]:
        """The names of the full blocks that may come from the prefix cache."""
        return self.chain.names(self.token_ids, len(self.token_ids) - 1)

    def launch(self, count: int, *, awaits: bool) -> None:
        """Record a launched step that computes the next `count` tokens, and samples one after them if `awaits`."""
        self.num_pending += count
        self.num_awaited += awaits

    def collect(self, count: int, *, awaits: bool) -> None:
        """Record that the oldest launched step is collected; the arguments are those of its `launch`."""
        self.num_pending -= count
        self.num_awaited -= awaits

    def advance(self, count: int, blocks: BlockPool) -> None:
        """Record that the KV of the next `count` tokens is computed, and name its full blocks in the prefix cache.

        Blocks that were full before, as after a swap, do not count as written again.
        """
        first_new = self.chain.num_full(self.num_computed)
        self.num_computed += count
        for index in range(self.num_named, self.chain.num_full(self.num_computed)):
            is_decoded = self.chain.num_tokens(index + 1) > self.prompt_length
            name = self.chain.name(index, self.token_ids)
            is_new = blocks.name(self.block_ids[index], name, is_decoded=is_decoded)
            self.num_written += self.chain.num_tokens(is_new and index >= first_new)
            self.num_named = index + 1

    def share(self, stem: "Sequence", blocks: BlockPool) -> None:
        """Start with the KV of the prompt that `stem` has computed, and any cached blocks of the outputs so far."""
        self.chain, self.counted_prompt = stem.chain.fork(), 0
        num_full = self.chain.num_full(self.prompt_length)
        found = blocks.find(self.prefix[num_full:])
        shared = stem.block_ids[:num_full] if found else stem.block_ids
        blocks.retain(shared)
        self.block_ids = array("i", (*shared, *found))
        self.num_named = num_full + len(found)
        self.num_computed = self.chain.num_tokens(self.num_named) if found else self.prompt_length

    def fork(self, token_id: int, blocks: BlockPool) -> "Sequence":
        """Return a sequence that continues with `token_id` and shares all blocks."""
        blocks.retain(self.block_ids)
        self.num_writable = 0
        return replace(
            self, token_ids=[*self.token_ids, token_id], chain=self.chain.fork(), block_ids=self.block_ids[:],
            counts=None if self.counts is None else self.counts.fork(),
        )  # fmt: skip

    def recount(self, rope: RopeLengths, blocks: BlockPool) -> None:
        """Drop KV rotated for a shorter sequence, once this one has passed the length where the model recomputes KV.

        The new KV has no names: other prompts start rotated for their own lengths.
        """
        counted = rope.counted_prompt(self.prompt_length, len(self.token_ids))
        if counted > max(self.prompt_length, self.counted_prompt):
            self.drop(blocks)
            self.chain, self.counted_prompt = PrefixChain("", None), counted

    def blocks_missing(self, count: int, blocks: BlockPool, block_size: int) -> int:
        """Return how many blocks must be allocated before the next `count` tokens can be written."""
        grow = -(-(self.num_launched + count) // block_size) - len(self.block_ids)
        return max(grow, 0) + self._writes_into_shared(blocks, block_size)

    def has_room(self, count: int) -> bool:
        """Return whether `make_room` has already reserved blocks for the next `count` tokens."""
        return self.num_computed + self.num_pending + count <= self.num_writable

    def make_room(self, count: int, blocks: BlockPool, model: Model, *, probe: bool) -> None:
        """Reserve blocks for the next `count` tokens, copying a shared one. Raises NoCapacity, with nothing changed."""
        block_size = model.info.layout.block_size
        missing = self.blocks_missing(count, blocks, block_size)
        if missing:
            fresh = blocks.allocate(missing, probe=probe)
            copies = self._writes_into_shared(blocks, block_size)
            self.block_ids.extend(fresh[copies:])
            if copies:
                self._copy_on_write(self.num_launched // block_size, fresh[0], blocks, model)
        self.num_writable = len(self.block_ids) * block_size

    def part(self, count: int) -> BatchSequence:
        """Return this sequence's part of a step that computes its next `count` tokens."""
        counted = max(self.prompt_length, self.counted_prompt)
        return BatchSequence(self.num_computed + self.num_pending, count, self.block_ids, counted)

    def next_tokens(self, count: int) -> list[int]:
        """Return the next `count` tokens to compute; one fewer if the last of them is awaited."""
        start = self.num_computed + self.num_pending
        return self.token_ids[start : start + count]

    def counted(self) -> TokenCounts:
        """Return its token counts, updated."""
        self.counts = self.counts or TokenCounts()
        return self.counts.update(self.token_ids, self.prompt_length)

    @property
    def saved_slots(self) -> tuple[int, ...]:
        """The slots with the copies of its blocks while it is swapped out."""
        return self.saved.slots if self.saved is not None else ()

    def swap_out(self, blocks: BlockPool, saved: SavedBlocks) -> None:
        """Release the blocks; copies of the computed ones are in `saved`."""
        blocks.release(self.block_ids)
        self.block_ids, self.num_named, self.num_writable, self.saved = array("i"), 0, 0, saved

    def swap_in(self, block_ids: Many[int], blocks: BlockPool) -> None:
        """Take over references to these blocks, into which the copies have been loaded."""
        assert self.saved is not None, "only a swapped-out sequence is swapped in"
        self.saved.release()
        self.block_ids, self.saved = array("i", block_ids), None
        self.advance(0, blocks)

    def drop(self, blocks: BlockPool) -> None:
        """Release blocks and copies; only the token ids remain."""
        if self.saved is not None:
            self.saved.release()
            self.saved = None
        blocks.release(self.block_ids)
        self.block_ids = array("i")
        self.num_computed = self.num_named = self.num_cached = self.num_writable = 0
        self.num_pending = self.num_awaited = 0

    def _writes_into_shared(self, blocks: BlockPool, block_size: int) -> bool:
        index = self.num_launched // block_size
        return index < len(self.block_ids) and blocks.is_shared(self.block_ids[index])

    def _copy_on_write(self, index: int, fresh: int, blocks: BlockPool, model: Model) -> None:
        shared, self.block_ids[index] = self.block_ids[index], fresh
        try:
            model.copy_block(shared, fresh)
        finally:
            blocks.release([shared])
