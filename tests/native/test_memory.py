"""Regions keep memory alive and know its address; runs are validated on construction."""

import ctypes
import mmap
from array import array

import pytest

from native.memory import MemoryRun, Region, Runs, StopFlag


def test_a_mapping_can_be_closed_once_its_region_is_gone() -> None:
    mapping = mmap.mmap(-1, 4096)
    region = Region(memoryview(mapping))
    with pytest.raises(BufferError):
        mapping.close()

    del region

    mapping.close()


def test_a_region_of_read_only_memory_has_its_address() -> None:
    data = b"where bytes are"

    region = Region(memoryview(data)[6:])

    assert ctypes.string_at(region.address, region.num_bytes) == b"bytes are"
    assert region.readonly


def test_memory_of_any_item_size_is_seen_as_bytes() -> None:
    region = Region(array("I", [1, 2]))

    assert (region.num_bytes, region.readonly, region.view.format) == (8, False, "B")


def test_memory_with_gaps_is_refused() -> None:
    with pytest.raises(BufferError, match="contiguous"):
        Region(memoryview(bytes(10))[::2])


def test_runs_know_their_size_and_extent() -> None:
    runs = Runs([MemoryRun(100, 8, 24, 3), (0, 10, 0, 1)])

    assert (runs.num_bytes, runs.extent) == (34, 156)
    assert list(runs.rows()) == [(100, 8), (124, 8), (148, 8), (0, 10)]
    assert (Runs([]).num_bytes, Runs([]).extent) == (0, 0)


def test_slots_are_contiguous_runs_or_one_row_each() -> None:
    assert list(Runs.of_slots([(2, 3), (9, 1)], 10).rows()) == [(20, 30), (90, 10)]
    assert list(Runs.of_slots([(2, 2)], 10, skip=4, row_bytes=3).rows()) == [(24, 3), (34, 3)]
    assert list(Runs.of_slots([(2, 1)], 10, skip=4).rows()) == [(24, 6)]


def test_joined_runs_are_concatenated_each_at_its_offset() -> None:
    one, two = Runs.of_slots([(2, 2)], 10, skip=4, row_bytes=3), Runs.of_slots([(0, 1), (7, 1)], 4)

    joined = Runs.joined([(0, one), (100, two)])

    assert list(joined.rows()) == [(24, 3), (34, 3), (100, 4), (128, 4)]
    assert (joined.num_bytes, joined.num_rows, joined.extent) == (14, 4, 132)
    assert list(one.rows()) == [(24, 3), (34, 3)]


def test_a_run_without_bytes_or_with_overlapping_rows_is_refused() -> None:
    for bad in [MemoryRun(0, 0), MemoryRun(0, 8, 8, 0), MemoryRun(0, 8, 7, 2)]:
        with pytest.raises(ValueError, match="no bytes, or rows that overlap"):
            Runs([bad])
    with pytest.raises(ValueError, match="four numbers from 0"):
        Runs([MemoryRun(-1, 8)])
    with pytest.raises(ValueError, match="a slot of 8 bytes"):
        Runs.of_slots([(0, 1)], 8, skip=4, row_bytes=5)


def test_a_stop_flag_stays_set_and_is_visible_to_native_code() -> None:
    flag = StopFlag()
    word = ctypes.c_int32.from_address(flag.address)
    assert not flag.is_set()
    assert word.value == 0

    flag.set()

    assert flag.is_set()
    assert word.value != 0
