"""Cached blocks: found by name with their tokens compared, kept while held, evicted leaf first and oldest first."""

import threading
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.blocks import BlockPool
from engine.prefix import BlockName, PrefixChain
from tests.engine.fake_engines import prompt
from wire.errors import NoCapacity

SIZE = 16


def pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, cached_block_size=SIZE)


def names(*words: str, salt: str = "") -> list[BlockName]:
    """Name a chain of blocks, each full of one letter of the word."""
    token_ids = [ord(word) for word in words for _ in range(SIZE)]
    return PrefixChain(salt, SIZE).names(token_ids, len(token_ids))


def compute(blocks: BlockPool, chain: list[BlockName]) -> tuple[int, ...]:
    """Take the blocks of a chain and name each, as if it was computed."""
    block_ids, _ = blocks.take(len(chain), chain)
    for block_id, name in zip(block_ids, chain, strict=True):
        blocks.name(block_id, name)
    return block_ids


def held(blocks: BlockPool, *words: str, salt: str = "") -> int:
    """Return how many blocks of a chain would be found."""
    found = blocks.find(names(*words, salt=salt))
    blocks.release(found)
    return len(found)


def test_a_released_block_is_found_again_only_by_the_same_tokens() -> None:
    blocks = pool(4)
    block_ids = compute(blocks, names("a", "b"))
    blocks.release(block_ids)
    assert (blocks.num_cached, blocks.num_used, blocks.num_free) == (2, 0, 4)

    again, num_held = blocks.take(3, names("a", "b", "c"))

    assert (again[:2], num_held) == (block_ids, 2)
    assert (blocks.num_cached, blocks.num_used) == (0, 3)
    blocks.check()


@pytest.mark.parametrize(
    "chain", [names("b"), names("x", "b"), names("a", "b", salt="other")], ids=["no root", "other root", "other salt"]
)
def test_another_prefix_is_not_found(chain: list[BlockName]) -> None:
    blocks = pool(4)
    blocks.release(compute(blocks, names("a", "b")))

    assert blocks.take(2, chain)[1] == 0


def test_a_digest_collision_is_not_a_hit() -> None:
    blocks = pool(4)
    (name,) = names("a")
    blocks.release(compute(blocks, [name]))

    for forged in (name._replace(token_ids=(1,) * SIZE), name._replace(salt="x"), name._replace(parent=bytes(31))):
        assert blocks.find([forged]) == ()
    assert len(blocks.find([name])) == 1


def test_a_block_in_use_is_shared_and_each_holder_releases_it() -> None:
    blocks = pool(4)
    first = compute(blocks, names("a"))
    second, _ = blocks.take(1, names("a"))

    assert (first, blocks.num_used, blocks.is_shared(first[0])) == (second, 1, True)
    blocks.release(first)
    assert blocks.num_used == 1
    blocks.release(second)
    assert (blocks.num_used, blocks.num_cached) == (0, 1)


def test_free_blocks_are_used_first_then_cached_leaves() -> None:
    blocks = pool(5)
    blocks.release(compute(blocks, names("a", "b", "c")))

    blocks.allocate(2)
    assert held(blocks, "a", "b", "c") == 3
    blocks.allocate(1)
    assert held(blocks, "a", "b", "c") == 2
    blocks.allocate(1)
    assert held(blocks, "a", "b", "c") == 1


def test_the_least_recently_used_goes_first() -> None:
    blocks = pool(4)
    blocks.release(compute(blocks, names("a", "b")))
    blocks.release(compute(blocks, names("x", "y")))
    assert held(blocks, "a", "b") == 2  # used again

    blocks.allocate(2)

    assert (held(blocks, "a", "b"), held(blocks, "x", "y")) == (2, 0)


def test_pinned_blocks_are_never_evicted() -> None:
    blocks = pool(4)
    compute(blocks, names("a", "b"))
    blocks.release(compute(blocks, names("x")))

    with pytest.raises(NoCapacity, match="2 of 4 KV blocks are free now, but 3 must be allocated"):
        blocks.allocate(3)
    blocks.allocate(2)
    assert (held(blocks, "a", "b"), held(blocks, "x")) == (2, 0)


def test_a_prefix_taking_the_last_free_blocks_is_refused() -> None:
    blocks = pool(3)
    blocks.release(compute(blocks, names("a", "b")))
    blocks.allocate(1)

    with pytest.raises(NoCapacity, match="0 of 3 KV blocks are free now, but 1 must be allocated"):
        blocks.take(3, names("a", "b", "c"))
    assert (blocks.num_used, blocks.num_cached, blocks.tokens_queried) == (1, 2, 2 * SIZE)
    blocks.check()


def test_the_parent_of_a_leaf_computed_twice_is_evicted_last() -> None:
    blocks = pool(4)
    mine, other = blocks.allocate(1), blocks.allocate(2)  # both compute "a" at once
    blocks.name(mine[0], names("a")[0])
    for block_id, name in zip(other, names("a", "b"), strict=True):
        blocks.name(block_id, name)
    blocks.release(mine)
    blocks.release(other)
    blocks.check()

    blocks.allocate(3)

    assert held(blocks, "a", "b") == 1


def test_queried_and_matched_tokens_are_counted() -> None:
    blocks = pool(8)
    blocks.release(compute(blocks, names("a", "b")))
    blocks.take(4, names("a", "b", "c"))

    assert (blocks.tokens_queried, blocks.tokens_found) == (5 * SIZE, 2 * SIZE)


def test_probes_and_pools_without_a_cache_name_nothing() -> None:
    state = prompt("p", 64)

    assert pool(2).chain(state).num_full(64) == 4
    assert pool(2).chain(replace(state, probe=True)).num_full(64) == 0
    assert BlockPool(2).chain(state).num_full(64) == 0


def test_threads_share_a_cached_pool() -> None:
    blocks, errors = pool(24), list[Exception]()

    def churn(own: str) -> None:
        try:
            for turn in range(150):
                chain = names("a", "b", own, str(turn % 5))
                block_ids = compute(blocks, chain)
                found = blocks.find(chain)
                assert len(found) == len(chain)
                blocks.release(found)
                blocks.release(block_ids)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=churn, args=(own,)) for own in "wxyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)

    assert errors == []
    assert blocks.num_used == 0
    blocks.check()


class Cache(RuleBasedStateMachine):
    """Prompts of a few letters come and go; their cached blocks must hold their tokens, by a plain record of writes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool(9)
        self.holds: dict[int, str] = {}  # what was last written, by block: all letters from the start
        self.running: list[tuple[str, tuple[int, ...]]] = []

    @rule(word=st.text("ab", min_size=1, max_size=5))
    def start(self, word: str) -> None:
        chain = names(*word)
        free, in_use = self.pool.num_free, self.pool.num_shareable(chain)
        try:
            block_ids, num_held = self.pool.take(len(word), chain)
        except NoCapacity:
            assert len(word) - in_use > free
            return
        assert free - self.pool.num_free == len(word) - in_use
        assert [self.holds[block] for block in block_ids[:num_held]] == [word[: i + 1] for i in range(num_held)]
        used = {block for _, ids in self.running for block in ids}
        assert not used & set(block_ids[num_held:])
        for i in range(num_held, len(word)):
            self.holds[block_ids[i]] = word[: i + 1]
        self.running.append((word, block_ids))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), upto=st.integers(0, 5))
    def compute(self, data: st.DataObject, upto: int) -> None:
        word, block_ids = data.draw(st.sampled_from(self.running))
        for block_id, name in list(zip(block_ids, names(*word), strict=True))[:upto]:
            self.pool.name(block_id, name)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, block_ids = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.release(block_ids)

    @invariant()
    def the_counts_agree(self) -> None:
        self.pool.check()
        assert self.pool.num_used == len({block for _, ids in self.running for block in ids})


TestCache = Cache.TestCase
