"""Block accounting of one KV pool: reference counts, free blocks and the prefix cache. Touches no KV memory.

    free   --allocate--> in use --release--> free, or cached where it has a name
    cached --take by name--> in use
    cached --allocate--> in use, its name removed

Free blocks are allocated before cached ones, and of these the least recently used first. A block that a launched step
writes stays in use until that step is collected, even if all its references are released before.
"""

import math
import threading
from collections.abc import Sequence

from engine.kv.named_blocks import NamedBlocks
from engine.prefix import BlockName, PrefixChain
from engine.rope_lengths import RopeLengths
from wire.errors import NeverFits, NoCapacity
from wire.types import PromptState


class BlockPool:
    """Reference counts of `num_total` blocks. Thread-safe; the free blocks are the set bits of one integer.

    If `cached_block_size` (tokens per block) is set, full blocks are cached for reuse, named by their tokens
    (engine/prefix.py) and by `root`, the model whose KV it is; `rope` makes names differ where keys depend on their
    prompt's length. Without `reuse_decoded` only blocks of prompts are named, not those of outputs.
    """

    def __init__(
        self, num_total: int, *, cached_block_size: int | None = None, root: str = "",
        rope: RopeLengths | None = None, reuse_decoded: bool = True,
    ) -> None:  # fmt: skip
        if num_total <= 0:
            raise ValueError(f"a pool needs at least one block, not {num_total}")
        self.num_total = num_total
        self._cached_block_size = cached_block_size
        self._root, self._rope, self._reuse_decoded = root, rope, reuse_decoded
        self._lock = threading.Lock()
        self._free = (1 << num_total) - 1
        self._num_unnamed = num_total  # free blocks without a name
        self._named = NamedBlocks()
        self._references = [0] * num_total
        self._probe_blocks: set[int] = set()
        self._writes: dict[int, int] = {}  # number of launched steps that write a block
        self._tokens_queried = self._tokens_found = self._tokens_found_decoded = 0

    def chain(self, state: PromptState) -> PrefixChain:
        """Return the names of a prompt's blocks; a probe has none: it neither uses nor fills the cache."""
        rotation = self._rope.rotation(len(state.token_ids)) if self._rope is not None else ""
        block_size = None if state.probe else self._cached_block_size
        limit = math.inf if self._reuse_decoded else len(state.token_ids)
        return PrefixChain(state.cache_salt, block_size, f"{self._root} {rotation}", state.images, limit)

    def allocate(self, num_blocks: int, *, probe: bool = False) -> tuple[int, ...]:
        """Take `num_blocks` free blocks with one reference each, contiguous if possible, low ids first.

        Raises NoCapacity when too few are free now, NeverFits when the pool is smaller than that.
        """
        return self.take(num_blocks, (), probe=probe)[0]

    def take(self, num_blocks: int, prefix: Sequence[BlockName], *, probe: bool = False) -> tuple[tuple[int, ...], int]:
        """Take `num_blocks`: cached ones with the longest leading part of `prefix`, then free ones.

        Returns the blocks and how many of them have the prefix: these may be shared and must not be written. Raises
        as `allocate` does.
        """
        if num_blocks > self.num_total:
            raise NeverFits(f"{num_blocks} KV blocks are needed, but the whole pool has {self.num_total}")
        with self._lock:
            held = self._named.find(prefix[:num_blocks])
            num_fresh = num_blocks - len(held)
            available = self._num_available - sum(self._named.is_idle(block_id) for block_id in held)
            if num_fresh > available:
                raise NoCapacity(
                    f"{available} of {self.num_total} KV blocks are free now, but {num_fresh} must be allocated"
                )
            for block_id in held:
                self._named.wake(block_id)
                self._references[block_id] += 1
            if self._cached_block_size is not None:
                self._tokens_queried += len(prefix) * self._cached_block_size
                self._tokens_found += len(held) * self._cached_block_size
                num_decoded = sum(map(self._named.is_decoded, held))
                self._tokens_found_decoded += num_decoded * self._cached_block_size
            return (*held, *self._take_fresh(num_fresh, probe)), len(held)

    def find(self, names: Sequence[BlockName]) -> tuple[int, ...]:
        """Take a reference to each block of the longest leading part of `names`, and return the blocks."""
        with self._lock:
            found = self._named.find(names)
            for block_id in found:
                self._named.wake(block_id)
                self._references[block_id] += 1
            return tuple(found)

    def num_shareable(self, prefix: Sequence[BlockName]) -> int:
        """Return how many blocks `take` would now share for this prefix instead of using up available ones."""
        with self._lock:
            return sum(not self._named.is_idle(block_id) for block_id in self._named.find(prefix))

    def name(self, block_id: int, name: BlockName, *, is_decoded: bool = False) -> bool:
        """Name a block in use for reuse; return False if the block has a name, or another block has this name.

        The block must be full, and its KV computed or verified.

        `is_decoded`: it has outputs, whose KV other kernels made.
        """
        with self._lock:
            self._demand_used([block_id])
            return self._named.put(block_id, name, is_decoded=is_decoded)

    def retain(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each block, which must be in use."""
        with self._lock:
            self._demand_used(block_ids)
            for block_id in block_ids:
                self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each, in the order of their tokens; the last one frees or caches the block.

        Raises ValueError, with nothing released, for a block that is already free or is given twice.
        """
        with self._lock:
            self._demand_used(block_ids)
            cached: list[int] = []
            for block_id in block_ids:
                self._references[block_id] -= 1
                if self._references[block_id] or block_id in self._writes:
                    continue
                if self._named.has_name(block_id):
                    cached.append(block_id)
                else:
                    self._add_free(block_id)
            self._named.rest(cached)

    def begin_writes(self, block_ids: Sequence[int]) -> None:
        """Mark these blocks, all in use, as written by a launched step: none is freed before `end_writes`."""
        with self._lock:
            self._demand_used(block_ids)
            for block_id in block_ids:
                self._writes[block_id] = self._writes.get(block_id, 0) + 1

    def end_writes(self, block_ids: Sequence[int]) -> None:
        """Unmark the blocks of a collected step, and free those released meanwhile."""
        with self._lock:
            for block_id in block_ids:
                left = self._writes.pop(block_id) - 1
                if left:
                    self._writes[block_id] = left
                elif self._references[block_id] == 0:
                    self._add_free(block_id)

    def is_shared(self, block_id: int) -> bool:
        """Return whether the block has more than one reference, and so must be copied before it is written."""
        with self._lock:
            return self._references[block_id] > 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, including cached ones."""
        with self._lock:
            return self._num_available

    @property
    def num_used(self) -> int:
        """Blocks in use, including those of probes."""
        with self._lock:
            return self.num_total - self._num_available

    @property
    def num_probe(self) -> int:
        """Blocks in use that were allocated for probes."""
        with self._lock:
            return len(self._probe_blocks)

    @property
    def num_cached(self) -> int:
        """Blocks without references that are kept for their reusable prefix."""
        with self._lock:
            return self._named.num_idle

    @property
    def tokens_queried(self) -> int:
        """Tokens of full blocks that prompts have looked up since the start."""
        return self._tokens_queried

    @property
    def tokens_found(self) -> int:
        """Those of the queried tokens that were found."""
        return self._tokens_found

    @property
    def tokens_found_decoded(self) -> int:
        """Those of the found tokens that are in blocks with outputs."""
        return self._tokens_found_decoded

    def check(self) -> None:
        """Assert the invariants: free + cached + used == total, only used blocks have references, names are valid."""
        with self._lock:
            free = {i for i in range(self.num_total) if self._free >> i & 1}
            used = {i for i, count in enumerate(self._references) if count > 0} | self._writes.keys()
            cached = {i for i in range(self.num_total) if self._named.is_idle(i)}
            assert len(free) == self._num_unnamed, f"{len(free)} bits are free, {self._num_unnamed} are counted"
            assert not free & used, f"free and in use at once: {sorted(free & used)[:8]}"
            assert not cached & (free | used), f"cached and free or used: {sorted(cached & (free | used))[:8]}"
            whole = len(free) + len(cached) + len(used)
            assert whole == self.num_total, f"{len(free)} free + {len(cached)} cached + {len(used)} used"
            assert not any(self._named.has_name(block) for block in free | self._probe_blocks), "a name without KV"
            assert not any(self._named.has_name(block) for block in self._writes), "a name before its KV"
            assert self._probe_blocks <= used, "a free block is counted as a probe's"
            self._named.check()

    @property
    def _num_available(self) -> int:
        return self._num_unnamed + self._named.num_idle

    def _take_fresh(self, num_blocks: int, probe: bool) -> tuple[int, ...]:
        for _ in range(num_blocks - self._num_unnamed):
            self._add_free(self._named.evict())
        block_ids = self._take(num_blocks)
        for block_id in block_ids:
            self._references[block_id] = 1
        if probe:
            self._probe_blocks.update(block_ids)
        return block_ids

    def _add_free(self, block_id: int) -> None:
        self._free |= 1 << block_id
        self._num_unnamed += 1
        self._probe_blocks.discard(block_id)

    def _take(self, num_blocks: int) -> tuple[int, ...]:
        whole_run = _lowest_run(self._free, num_blocks)
        if whole_run is not None:
            self._mark_taken(whole_run, num_blocks)
            return tuple(range(whole_run, whole_run + num_blocks))
        taken: list[int] = []
        while len(taken) < num_blocks:
            start = _lowest_bit(self._free)
            length = min(_lowest_bit(~(self._free >> start)), num_blocks - len(taken))
            self._mark_taken(start, length)
            taken.extend(range(start, start + length))
        return tuple(taken)

    def _mark_taken(self, start: int, length: int) -> None:
        self._free &= ~(((1 << length) - 1) << start)
        self._num_unnamed -= length

    def _demand_used(self, block_ids: Sequence[int]) -> None:
        if len(set(block_ids)) != len(block_ids):
            raise ValueError(f"a block is given twice in {list(block_ids)[:16]}")
        for block_id in block_ids:
            if not 0 <= block_id < self.num_total or self._references[block_id] == 0:
                raise ValueError(f"block {block_id} is not in use (pool of {self.num_total} blocks)")


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _lowest_run(bits: int, length: int) -> int | None:
    """Return the start of the lowest run of `length` set bits: bit i stays set while bits i..i+covered-1 are set."""
    if length == 0:
        return 0
    covered = 1
    while covered < length and bits:
        shift = min(covered, length - covered)
        bits &= bits >> shift
        covered += shift
    return _lowest_bit(bits) if bits else None
