"""Block accounting of one KV pool: who holds how many references to which block. No memory is touched here."""

import threading
from collections.abc import Sequence

from wire.errors import NeverFits, NoCapacity


class BlockPool:
    """Reference counts of `num_total` blocks. Thread-safe; the free blocks are the set bits of one integer."""

    def __init__(self, num_total: int) -> None:
        if num_total <= 0:
            raise ValueError(f"a pool needs at least one block, not {num_total}")
        self.num_total = num_total
        self._lock = threading.Lock()
        self._free = (1 << num_total) - 1
        self._num_free = num_total
        self._references = [0] * num_total
        self._probe_blocks: set[int] = set()

    def allocate(self, num_blocks: int, *, probe: bool = False) -> tuple[int, ...]:
        """Take `num_blocks` free blocks with one reference each, neighbours where there are any, low ids first.

        Raises NoCapacity when too few are free now, NeverFits when the pool is smaller than that.
        """
        if num_blocks > self.num_total:
            raise NeverFits(f"{num_blocks} KV blocks are needed, the whole pool has {self.num_total}")
        with self._lock:
            if num_blocks > self._num_free:
                raise NoCapacity(
                    f"{num_blocks} KV blocks are needed, {self._num_free} of {self.num_total} are free now"
                )
            block_ids = self._take(num_blocks)
            for block_id in block_ids:
                self._references[block_id] = 1
            if probe:
                self._probe_blocks.update(block_ids)
            return block_ids

    def retain(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each block, which must be in use."""
        with self._lock:
            self._demand_used(block_ids)
            for block_id in block_ids:
                self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each; the last one frees the block.

        Raises ValueError, with nothing released, for a block that is free already or named twice.
        """
        with self._lock:
            self._demand_used(block_ids)
            for block_id in block_ids:
                self._references[block_id] -= 1
                if self._references[block_id] == 0:
                    self._free |= 1 << block_id
                    self._num_free += 1
                    self._probe_blocks.discard(block_id)

    def is_shared(self, block_id: int) -> bool:
        """Whether the block has more than one reference: to be copied before it is written."""
        with self._lock:
            return self._references[block_id] > 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        with self._lock:
            return self._num_free

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference, those of probes included."""
        with self._lock:
            return self.num_total - self._num_free

    @property
    def num_probe(self) -> int:
        """Blocks in use that were allocated for probes."""
        with self._lock:
            return len(self._probe_blocks)

    @property
    def num_cached(self) -> int:
        """Blocks without a reference that keep a reusable prefix: none, there is no prefix cache yet."""
        return 0

    def check(self) -> None:
        """Assert the invariants: free + used == total, free blocks have no reference, probe blocks are in use."""
        with self._lock:
            free = {i for i in range(self.num_total) if self._free >> i & 1}
            used = {i for i, count in enumerate(self._references) if count > 0}
            assert len(free) == self._num_free, f"{len(free)} bits are free, {self._num_free} are counted"
            assert not free & used, f"free and in use at once: {sorted(free & used)[:8]}"
            assert len(free) + len(used) == self.num_total, f"{len(free)} free + {len(used)} used of {self.num_total}"
            assert self._probe_blocks <= used, "a free block is counted as a probe's"

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
        self._num_free -= length

    def _demand_used(self, block_ids: Sequence[int]) -> None:
        if len(set(block_ids)) != len(block_ids):
            raise ValueError(f"a block is named twice in {list(block_ids)[:16]}")
        for block_id in block_ids:
            if not 0 <= block_id < self.num_total or self._references[block_id] == 0:
                raise ValueError(f"block {block_id} is not in use (pool of {self.num_total} blocks)")


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _lowest_run(bits: int, length: int) -> int | None:
    """Return where the lowest run of `length` set bits starts: bit i survives while bits i..i+covered-1 are set."""
    if length == 0:
        return 0
    covered = 1
    while covered < length and bits:
        shift = min(covered, length - covered)
        bits &= bits >> shift
        covered += shift
    return _lowest_bit(bits) if bits else None
