"""Block accounting: references, refusals with numbers, contiguity, and the invariants under random use and threads."""

import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.blocks import BlockPool
from wire.errors import NeverFits, NoCapacity


def test_low_neighbours_are_taken_first() -> None:
    pool = BlockPool(8)

    assert pool.allocate(3) == (0, 1, 2)
    assert pool.allocate(2) == (3, 4)


def test_a_whole_run_is_preferred_to_lower_pieces() -> None:
    pool = BlockPool(8)
    pool.allocate(8)
    pool.release([0, 2, 4, 5, 6])

    assert pool.allocate(3) == (4, 5, 6)
    assert pool.allocate(2) == (0, 2)


def test_pieces_are_joined_when_no_run_is_long_enough() -> None:
    pool = BlockPool(8)
    pool.allocate(8)
    pool.release([1, 3, 4, 6])

    assert pool.allocate(4) == (1, 3, 4, 6)
    assert pool.num_free == 0


def test_too_few_free_blocks_raise_no_capacity_with_numbers() -> None:
    pool = BlockPool(4)
    pool.allocate(3)

    with pytest.raises(NoCapacity, match="1 of 4 KV blocks are free now, but 2 must be allocated"):
        pool.allocate(2)
    assert pool.num_used == 3


def test_more_blocks_than_the_pool_never_fit() -> None:
    with pytest.raises(NeverFits, match="5 KV blocks are needed, but the whole pool has 4"):
        BlockPool(4).allocate(5)


def test_a_block_is_free_with_its_last_reference() -> None:
    pool = BlockPool(4)
    block_ids = pool.allocate(2)
    pool.retain(block_ids)

    assert pool.is_shared(block_ids[0])
    pool.release(block_ids)
    assert (pool.num_used, pool.is_shared(block_ids[0])) == (2, False)
    pool.release(block_ids)
    assert pool.num_used == 0


@pytest.mark.parametrize("block_ids", [[3], [0, 3], [0, 0], [-1], [4]])
def test_a_wrong_release_is_refused_and_changes_nothing(block_ids: list[int]) -> None:
    pool = BlockPool(4)
    pool.allocate(3)

    with pytest.raises(ValueError, match="block"):
        pool.release(block_ids)
    assert pool.num_used == 3
    pool.check()


def test_probe_blocks_are_counted_separately() -> None:
    pool = BlockPool(4)
    probe = pool.allocate(2, probe=True)
    pool.allocate(1)

    assert (pool.num_used, pool.num_probe) == (3, 2)
    pool.release(probe)
    assert (pool.num_used, pool.num_probe) == (1, 0)


def test_nothing_is_allocated_for_no_blocks() -> None:
    pool = BlockPool(1)
    pool.allocate(1)

    assert pool.allocate(0) == ()
    pool.check()


def test_threads_share_a_pool() -> None:
    pool, errors = BlockPool(64), list[Exception]()

    def churn() -> None:
        try:
            for _ in range(300):
                pool.release(pool.allocate(7))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)

    assert errors == []
    assert pool.num_used == 0
    pool.check()


class Accounting(RuleBasedStateMachine):
    """Compares the pool with a plain dict of references."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.held: list[tuple[int, ...]] = []

    @rule(count=st.integers(0, 13), probe=st.booleans())
    def allocate(self, count: int, probe: bool) -> None:
        free = 12 - len({block for ids in self.held for block in ids})
        if count > free:
            with pytest.raises(NeverFits if count > 12 else NoCapacity):
                self.pool.allocate(count, probe=probe)
        else:
            fresh = self.pool.allocate(count, probe=probe)
            assert len(set(fresh)) == count
            assert not set(fresh) & {block for ids in self.held for block in ids}
            self.held.append(fresh)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.sampled_from(self.held))
        self.pool.retain(block_ids)
        self.held.append(block_ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def the_counts_agree(self) -> None:
        self.pool.check()
        assert self.pool.num_used == len({block for ids in self.held for block in ids})


TestAccounting = Accounting.TestCase


def test_a_block_is_free_after_its_last_launched_step() -> None:
    pool = BlockPool(4)
    given, kept = pool.allocate(2), pool.allocate(1, probe=True)
    pool.begin_writes((*given, *kept))
    pool.begin_writes(given[:1])
    pool.release((*given, *kept))
    pool.check()
    assert (pool.num_free, pool.num_used, pool.num_probe) == (1, 3, 1)

    pool.end_writes((*given, *kept))
    pool.check()
    assert (pool.num_free, pool.num_used, pool.num_probe) == (3, 1, 0)

    pool.end_writes(given[:1])
    pool.check()
    assert pool.num_free == 4


def test_a_block_that_is_still_held_stays_so_when_its_write_ends() -> None:
    pool = BlockPool(2)
    given = pool.allocate(1)
    pool.begin_writes(given)
    pool.end_writes(given)

    assert pool.num_used == 1
    with pytest.raises(ValueError, match=r"block 1 is not in use"):
        pool.begin_writes((1,))
    pool.release(given)
    assert pool.num_free == 2
