"""One contract for the native functions and their Python replacement; xxhash is the oracle."""

import mmap
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.digest import (
    Mover,
    PythonMover,
    Region,
    RegionRuns,
    Runs,
    StopFlag,
    make_mover,
)
from kvtransfer.slots import SlotMap, window
from native.move_library import Library, build
from tests.examples import examples
from wire.errors import ConfigError
from wire.kv_layout import Heads, KvTensor, PoolLayout

KERNELS = ["python", "native-0", "native-1", "native-2", "native-3"]
DATA = random.Random(0).randbytes(1 << 20)


@pytest.fixture(scope="module", params=KERNELS)
def mover(request: pytest.FixtureRequest) -> Mover:
    name, _, number = str(request.param).partition("-")
    if name == "python":
        return PythonMover()
    request.getfixturevalue("native_libraries")
    library = build()
    if int(number) not in library.kernels:
        pytest.skip(f"this CPU has no kernel {number}, it has {library.kernels}")
    return Library(library.path, kernel=int(number))


def whole(data: bytes | bytearray | memoryview) -> RegionRuns:
    return RegionRuns(Region(data), 0, Runs([(0, len(data), 0, 1)] if len(data) else []))


def bytes_of(memory: bytes | bytearray, base: int, runs: list[tuple[int, int, int, int]]) -> bytes:
    """Read runs from memory without the code under test."""
    starts = ((base + offset + row * stride, count) for offset, count, stride, rows in runs for row in range(rows))
    return b"".join(memory[start : start + count] for start, count in starts)


@contextmanager
def read_only_mapping(data: bytes) -> Iterator[mmap.mmap]:
    """Map a memfd that holds `data` as a peer's pool is mapped."""
    fd = os.memfd_create("test")
    try:
        os.write(fd, data)
        with mmap.mmap(fd, len(data), flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapping:
            yield mapping
    finally:
        os.close(fd)


class FlagInTheTarget(StopFlag):
    """A flag whose word is a piece of the target, so that the move itself sets it when it gets there."""

    __slots__ = ("_at", "_region")

    def __init__(self, region: Region, at: int) -> None:
        super().__init__()
        self._region, self._at = region, at
        self.address = region.address + at

    def is_set(self) -> bool:
        return any(self._region.view[self._at : self._at + 4])


def test_the_digest_is_that_of_xxhash_for_every_short_length(mover: Mover) -> None:
    for num_bytes in [*range(1100), *range(1100, 5001, 37), 65_535, 65_536, 65_537, len(DATA)]:
        data = DATA[:num_bytes]

        assert mover.digest(whole(data)) == xxhash.xxh3_64_intdigest(data), num_bytes


@pytest.mark.long
def test_the_digest_is_that_of_xxhash_for_every_length_to_5000(mover: Mover) -> None:
    for num_bytes in range(5001):
        data = DATA[num_bytes : 2 * num_bytes]
        target = bytearray(num_bytes)

        assert mover.copy_and_digest(whole(data), whole(target), StopFlag()) == xxhash.xxh3_64_intdigest(data)
        assert target == data


@st.composite
def cuttings(draw: st.DrawFn, num_bytes: int) -> list[tuple[int, int, int, int]]:
    """Draw runs of `num_bytes` in all; they do not overlap."""
    runs, offset, left = [], draw(st.integers(0, 70)), num_bytes
    while left:
        row_bytes = draw(st.one_of(st.sampled_from([64, 128, 384, 1024, 6144]), st.integers(1, 200)))
        row_bytes = min(row_bytes, left)
        rows = draw(st.integers(1, min(20, left // row_bytes)))
        stride = row_bytes + draw(st.sampled_from([0, 1, 64, 256, 13]))
        runs.append((offset, row_bytes, stride, rows))
        offset += rows * stride + draw(st.sampled_from([0, 1, 64, 100]))
        left -= rows * row_bytes
    return draw(st.permutations(runs))


@st.composite
def moves(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int, int]], list[tuple[int, int, int, int]]]:
    num_bytes = draw(st.one_of(st.integers(0, 600), st.integers(0, 5000), st.sampled_from([16_384, 20_000])))
    return draw(st.integers(0, 70)), draw(cuttings(num_bytes)), draw(cuttings(num_bytes))


@examples(50)
@given(moves())
def test_bytes_cut_differently_are_copied_in_order_and_digested(
    mover: Mover, move: tuple[int, list[tuple[int, int, int, int]], list[tuple[int, int, int, int]]]
) -> None:
    base, source_runs, target_runs = move
    sources, targets = Runs(source_runs), Runs(target_runs)
    before = DATA[7 : 7 + base + targets.extent + 3]
    memory, plain = bytearray(before), bytearray(before)
    source = RegionRuns(Region(DATA), base, sources)
    target, copied = RegionRuns(Region(memory), base, targets), RegionRuns(Region(plain), base, targets)
    data = bytes_of(DATA, base, source_runs)

    digest = mover.copy_and_digest(source, target, StopFlag())

    assert digest == xxhash.xxh3_64_intdigest(data)
    assert bytes_of(memory, base, target_runs) == data
    for offset, row_bytes, stride, rows in target_runs:  # only the target's runs have changed
        for start in range(base + offset, base + offset + rows * stride, stride):
            plain[start : start + row_bytes] = memory[start : start + row_bytes]
    assert plain == memory
    plain[:] = before
    assert mover.digest(source) == mover.digest(target) == digest
    assert mover.copy(source, copied, StopFlag())
    assert plain == memory


@pytest.mark.parametrize("shift", [0, 1, 32, 64])
def test_large_runs_are_exact_at_any_alignment(mover: Mover, shift: int) -> None:
    data = DATA[shift : shift + 700_001]
    memory = mmap.mmap(-1, len(data) + 200)  # begins at a page
    view = memoryview(memory)
    target = RegionRuns(Region(view), shift, Runs([(0, len(data), 0, 1)]))

    digest = mover.copy_and_digest(whole(data), target, StopFlag())

    assert digest == xxhash.xxh3_64_intdigest(data)
    assert view[shift : shift + len(data)] == data
    assert not any(view[:shift]) and not any(view[shift + len(data) :])  # noqa: PT018
    view[:] = bytes(len(view))
    assert mover.copy(whole(data), target, StopFlag())
    assert view[shift : shift + len(data)] == data
    assert not any(view[:shift]) and not any(view[shift + len(data) :])  # noqa: PT018


def test_heads_of_a_shuffled_pool_reach_the_other_pool(mover: Mover) -> None:
    slots, slot_bytes = 512, 384
    order = random.Random(1).sample(range(slots // 16), slots // 16)
    heads = Runs.of_slots([(block * 16, 16) for block in order], slot_bytes, skip=128, row_bytes=128)
    flat = Runs.of_slots([(0, slots)], 128)
    memory = bytearray(slots * 128)
    wanted = b"".join(
        DATA[slot * 384 + 128 : slot * 384 + 256] for block in order for slot in range(block * 16, block * 16 + 16)
    )

    digest = mover.copy_and_digest(RegionRuns(Region(DATA), 0, heads), RegionRuns(Region(memory), 0, flat), StopFlag())

    assert memory == wanted
    assert digest == xxhash.xxh3_64_intdigest(wanted)


def test_a_read_only_mapping_is_a_source_and_no_target(mover: Mover) -> None:
    with read_only_mapping(DATA) as mapping:
        source, memory = whole(memoryview(mapping)), bytearray(len(DATA))

        assert mover.copy_and_digest(source, whole(memory), StopFlag()) == xxhash.xxh3_64_intdigest(DATA)
        assert memory == DATA
        with pytest.raises(ValueError, match="read-only"):
            mover.copy(whole(memory), source, StopFlag())
        with pytest.raises(ValueError, match="read-only"):
            mover.copy_and_digest(whole(memory), source, StopFlag())
        del source


def test_runs_past_their_region_are_refused_with_both_numbers(mover: Mover) -> None:
    memory = bytearray(100)
    inside, outside = (
        RegionRuns(Region(memory), 0, Runs([(0, 50, 0, 1)])),
        RegionRuns(Region(memory), 60, Runs([(0, 50, 0, 1)])),
    )
    rows = RegionRuns(Region(memory), 0, Runs([(0, 10, 46, 3)]))  # the last ends at 102

    for bad in (outside, rows, RegionRuns(Region(memory), -1, inside.runs)):
        with pytest.raises(IndexError, match="but the region has 100"):
            mover.digest(bad)
        with pytest.raises(IndexError):
            mover.copy(RegionRuns(Region(DATA), 0, bad.runs), bad, StopFlag())
        with pytest.raises(IndexError):
            mover.copy_and_digest(bad, RegionRuns(Region(bytearray(200)), 0, bad.runs), StopFlag())


def test_unequal_sizes_are_refused_with_both_numbers(mover: Mover) -> None:
    with pytest.raises(ValueError, match="the source has 10 bytes, but the target has 11"):
        mover.copy_and_digest(whole(bytes(10)), whole(bytearray(11)), StopFlag())
    with pytest.raises(ValueError, match="the source has 10 bytes, but the target has 11"):
        mover.copy(whole(bytes(10)), whole(bytearray(11)), StopFlag())


def test_a_set_flag_stops_a_move_before_its_first_byte(mover: Mover) -> None:
    memory, stop = bytearray(len(DATA)), StopFlag()
    stop.set()

    assert mover.copy_and_digest(whole(DATA), whole(memory), stop) is None
    assert not mover.copy(whole(DATA), whole(memory), stop)
    assert not any(memory)


@pytest.mark.parametrize("digest", [True, False])
def test_a_flag_set_in_the_middle_is_seen_within_256_kib(mover: Mover, digest: bool) -> None:
    memory, look = bytearray(len(DATA)), 256 << 10
    target = whole(memory)
    stop = FlagInTheTarget(target.region, look + 4096)

    if digest:
        assert mover.copy_and_digest(whole(DATA), target, stop) is None
    else:
        assert not mover.copy(whole(DATA), target, stop)

    assert memory == DATA[: 2 * look] + bytes(len(DATA) - 2 * look)


def test_a_bad_setting_is_a_config_error_and_off_is_python() -> None:
    assert make_mover({"PDSERVE_NATIVE": "off"}).name == "python"
    with pytest.raises(ConfigError, match="PDSERVE_NATIVE=maybe"):
        make_mover({"PDSERVE_NATIVE": "maybe"})


def test_slots_of_every_tensor_are_the_runs_of_the_layout() -> None:
    tensors = (KvTensor(0, "k", 2, 8, "float32"), KvTensor(0, "v", 1, 8, "bfloat16"))
    layout = PoolLayout(tensors, num_blocks=16, block_size=4)
    memory, blocks = memoryview(bytearray(layout.total_bytes)), (3, 4, 9, 2)

    for tensor in range(2):
        where = window(blocks, 4, 5, 15)
        place = SlotMap(layout, memory).place(tensor, where)
        expected = [(run.offset, run.length) for run in layout.runs(tensor, blocks, 5, 15)]
        assert where.block_ids == (4, 9, 2)
        assert [(place.base + offset, length) for offset, length in place.runs.rows()] == expected


@pytest.mark.parametrize("heads", [None, Heads(0, 1)])
def test_neighbouring_tensors_are_one_place_in_their_order(mover: Mover, heads: Heads | None) -> None:
    tensors = (KvTensor(0, "k", 2, 8, "float32"), KvTensor(0, "v", 2, 4, "bfloat16"), KvTensor(1, "k", 2, 8, "float32"))
    layout = PoolLayout(tensors, num_blocks=16, block_size=4)
    memory = bytearray(layout.total_bytes)
    memory[:] = DATA[: len(memory)]
    slots, blocks = SlotMap(layout, memoryview(memory)), (3, 4, 9, 2)

    places = [slots.place(tensor, window(blocks, 4, 5, 15), heads) for tensor in range(3)]
    for first, count in ((0, 3), (1, 2), (2, 1)):
        place = slots.place(first, window(blocks, 4, 5, 15), heads, count)
        of_it = places[first : first + count]
        copy = bytearray(place.runs.num_bytes)
        wanted = b"".join(_bytes_of(one) for one in of_it)
        assert mover.copy(place, whole(copy), StopFlag())
        assert copy == wanted
        assert mover.digest(place) == xxhash.xxh3_64_intdigest(wanted)


def test_places_of_the_same_shape_share_their_runs() -> None:
    layout = PoolLayout([KvTensor(layer, "k", 2, 8, "float32") for layer in range(6)], num_blocks=16, block_size=4)
    slots, where = SlotMap(layout, memoryview(bytearray(layout.total_bytes))), window((3, 4, 9, 2), 4, 5, 15)

    first, last = slots.place(0, where, None, 3), slots.place(3, where, None, 3)

    assert first.runs is last.runs
    assert last.base - first.base == layout.offsets[3]


def _bytes_of(place: RegionRuns) -> bytes:
    rows = ((place.base + offset, num_bytes) for offset, num_bytes in place.runs.rows())
    return b"".join(bytes(place.region.view[start : start + num_bytes]) for start, num_bytes in rows)
