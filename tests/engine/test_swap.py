"""The swap area's accounting and the copies behind it: each block once, all or nothing, slots reused."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from devices.host_pool import HostPool
from engine.kv import block_store
from engine.kv.block_store import BlockStore, Copier
from engine.kv.swap import SavedBlocks, SwapArea
from engine.prefix import BlockName, PrefixChain
from native import move_library
from testing.engine.fake_model import FakeModel, fake_layouts
from tests.engine.fake_engines import CONFIG
from wire.kv_layout import KvTensor, PoolLayout

BLOCK_BYTES = CONFIG.block_size * CONFIG.num_layers * 2 * CONFIG.heads * CONFIG.head_dim * 4


def names(salt: str, count: int) -> list[BlockName]:
    return PrefixChain(salt, 16).names(list(range(16 * count)), 16 * count)


class Recording(FakeModel):
    """Records which block went to which slot."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.saved: list[tuple[int, int]] = []

    def save_blocks(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        super().save_blocks(block_ids, slots)
        self.saved.extend(zip(block_ids, slots, strict=True))


def test_as_many_slots_as_fit_the_bytes() -> None:
    model = Recording()

    assert [SwapArea(model, size).num_slots for size in (0, BLOCK_BYTES - 1, BLOCK_BYTES, 5 * BLOCK_BYTES + 1)] == [
        0, 0, 1, 5
    ]  # fmt: skip
    model.close()


def test_all_are_copied_or_none() -> None:
    model = Recording()
    area = SwapArea(model, 3 * BLOCK_BYTES)
    slots = area.save({7: None, 9: None})
    assert slots == {7: 0, 9: 1}

    assert area.save({1: None, 2: None}) is None
    assert (model.saved, area.num_used) == ([(7, 0), (9, 1)], 2)
    area.release([0, 1])
    assert area.save({1: None, 2: None, 3: None}) == {1: 0, 2: 1, 3: 2}
    area.check()
    model.close()


def test_a_named_block_is_copied_once_for_all_sequences() -> None:
    model = Recording()
    area, (first, second) = SwapArea(model, 4 * BLOCK_BYTES), names("t", 2)
    mine = area.save({3: first, 4: second, 5: None})
    theirs = area.save({8: first, 9: None})

    assert mine == {3: 0, 4: 1, 5: 2}
    assert theirs == {8: 0, 9: 3}
    assert model.saved == [(3, 0), (4, 1), (5, 2), (9, 3)]
    area.release([0, 1, 2])
    assert (area.num_used, area.save({6: names("other", 1)[0]})) == (2, {6: 1})
    area.release([0, 3, 1])
    assert area.save({8: first}) == {8: 0}
    assert model.saved[-1] == (8, 0)
    area.check()
    model.close()


def test_two_blocks_of_one_name_have_one_slot() -> None:
    model = Recording()
    area, (first, second) = SwapArea(model, 3 * BLOCK_BYTES), names("t", 2)
    slots = area.save({3: first, 4: second, 5: first, 6: None})

    assert slots == {3: 0, 4: 1, 5: 0, 6: 2}
    assert model.saved == [(3, 0), (4, 1), (6, 2)]
    area.release([0, 1, 2])
    area.check()
    assert (area.num_used, area.save({9: first})) == (1, {9: 0})
    area.release([0, 0])
    area.check()
    assert area.num_used == 0
    model.close()


def test_blocks_of_one_digest_with_other_tokens_are_not_one() -> None:
    model = Recording()
    area, (name,) = SwapArea(model, 3 * BLOCK_BYTES), names("t", 1)
    other = name._replace(token_ids=tuple(range(1, 17)))
    area.save({3: name})

    assert area.save({4: other}) == {4: 1}
    area.check()
    area.release([0])
    area.check()
    area.release([1])
    area.check()
    assert area.num_used == 0
    model.close()


def test_a_sequences_copies_are_released_once() -> None:
    model = Recording()
    area = SwapArea(model, 4 * BLOCK_BYTES)
    slots = area.save({3: None, 4: None})
    assert slots is not None
    one, other = SavedBlocks(area, [0, 1]), SavedBlocks(area, [0])
    area.release(list(slots.values()))

    one.release()
    one.release()
    assert (area.num_used, one.slots, other.slots) == (1, (), (0,))
    other.release()
    assert area.num_used == 0
    area.check()
    model.close()


def test_a_copy_that_fails_holds_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    model = Recording()
    area, (name,) = SwapArea(model, 4 * BLOCK_BYTES), names("t", 1)
    area.save({1: name})
    monkeypatch.setattr(model, "save_blocks", fail)
    with pytest.raises(MemoryError):
        area.save({2: name, 3: None})

    assert area.num_used == 1
    area.check()
    model.close()


LATENT = PoolLayout(
    [KvTensor(0, "latent", 1, 6, "bfloat16"), KvTensor(1, "k", 3, 5, "float32")], num_blocks=6, block_size=16
)
COPIERS: dict[str, Callable[[], Copier | None]] = {"native": move_library.load, "python": lambda: None}


@pytest.fixture(params=[None, 1, 3], ids=["one extent", "an extent a slot", "three slots an extent"])
def slots_an_extent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let so many slots of the latent layout share an extent."""
    if request.param is not None:
        size = LATENT.block_size * sum(tensor.token_bytes for tensor in LATENT.tensors)
        monkeypatch.setattr(block_store, "_EXTENT_BYTES", request.param * size)


@pytest.mark.usefixtures("native_libraries")
@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_byte_of_a_block_is_restored_into_another_one(ranks: int, copier: str) -> None:
    config = replace(CONFIG, ranks=ranks, heads=3, num_blocks=6)
    for layout in fake_layouts(config):
        _round_trip(layout, copier, {4: 0, 1: 2}, {2: 5, 0: 0})


@pytest.mark.combinations(2)
@pytest.mark.usefixtures("native_libraries", "slots_an_extent")
@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ({4: 0, 1: 2}, {2: 5, 0: 0}),
        ({0: 0, 1: 1, 2: 2, 3: 3, 5: 4}, {1: 1, 2: 2, 3: 3, 4: 0}),
        ({5: 7, 4: 6, 3: 5, 1: 9, 2: 10}, {7: 0, 10: 1, 9: 2, 6: 3, 5: 4}),
    ],
    ids=["far apart", "neighbours", "backwards"],
)
def test_tensors_of_different_shapes_are_restored(copier: str, saved: dict[int, int], loaded: dict[int, int]) -> None:
    _round_trip(LATENT, copier, saved, loaded)


def test_the_copier_is_made_once_at_the_first_copy() -> None:
    made: list[None] = []
    with HostPool(LATENT) as pool:
        store = BlockStore(pool, lambda: made.append(None))
        assert made == []
        store.save([1], [0])
        store.load([0], [2])

    assert made == [None]


def _round_trip(layout: PoolLayout, copier: str, saved: dict[int, int], loaded: dict[int, int]) -> None:
    """Save blocks to slots, overwrite the pool, load slots into blocks: those alone must have changed, and be equal."""
    with HostPool(layout) as pool:
        pool.buffer[:] = random.Random(1).randbytes(layout.total_bytes)
        before = {slot: _block(pool, layout, block) for block, slot in saved.items()}
        store = BlockStore(pool, COPIERS[copier])
        store.save(list(saved), list(saved.values()))
        pool.buffer[:] = noise = random.Random(2).randbytes(layout.total_bytes)
        store.load(list(loaded), list(loaded.values()))

        assert [_block(pool, layout, block) for block in loaded.values()] == [before[slot] for slot in loaded]
        changed = bytes(pool.buffer)
        for block in loaded.values():
            for tensor in range(len(layout.tensors)):
                (run,) = layout.runs(tensor, [block], 0, layout.block_size)
                end = run.offset + run.length
                changed = changed[: run.offset] + noise[run.offset : end] + changed[end:]
        assert changed == noise


def _block(pool: HostPool, layout: PoolLayout, block: int) -> bytes:
    runs = [run for tensor in range(len(layout.tensors)) for run in layout.runs(tensor, [block], 0, layout.block_size)]
    return b"".join(bytes(pool.buffer[run.offset : run.offset + run.length]) for run in runs)
