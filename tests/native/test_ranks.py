"""The native sum over ranks: equal to numpy's for every size, and every wait ends."""

import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from native.builder import build_library
from native.ranks import LINE_BYTES, RECIPE, RanksLibrary, SumOutcome, shared_bytes

_SLOT = 64 * 4
_WAIT_S = 300.0


@pytest.fixture(scope="module")
def library(native_libraries: None) -> RanksLibrary:
    return build_library(RECIPE, os.environ)


class Shared:
    """The ranks' memory, and their calls as threads."""

    def __init__(self, library: RanksLibrary, num_ranks: int) -> None:
        self._library, self.num_ranks = library, num_ranks
        self._memory = (ctypes.c_char * shared_bytes(num_ranks, _SLOT))()

    def sum(self, rank: int, data: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]", timeout_s: float) -> SumOutcome:
        where = ctypes.addressof(self._memory)
        return self._library.sum(where, rank, self.num_ranks, _SLOT, data.ctypes.data, data.size, timeout_s)

    def abort(self) -> None:
        ctypes.c_uint64.from_buffer(self._memory, self.num_ranks * LINE_BYTES).value = 1


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_rank_gets_the_same_sum_in_every_round(library: RanksLibrary, num_ranks: int) -> None:
    shared, numbers = Shared(library, num_ranks), np.random.default_rng(0)
    sizes = (1, 63, 64, 65, 200, 1000)
    rounds = [numbers.standard_normal((num_ranks, size), dtype=np.float32) for _ in range(20) for size in sizes]
    summed = [data.copy() for data in rounds]

    def work(rank: int) -> list[SumOutcome]:
        return [shared.sum(rank, data[rank], _WAIT_S) for data in summed]

    with ThreadPoolExecutor(num_ranks) as pool:
        outcomes = [*pool.map(work, range(num_ranks))]

    assert {outcome for of_rank in outcomes for outcome in of_rank} == {SumOutcome.DONE}
    for before, after in zip(rounds, summed, strict=True):
        expected = before[0].copy()
        for rank in range(1, num_ranks):
            expected += before[rank]  # in the order of ranks, so the bits are the same
        assert all(np.array_equal(of_rank, expected) for of_rank in after)


def test_a_wait_for_an_absent_rank_times_out(library: RanksLibrary) -> None:
    assert Shared(library, 2).sum(0, np.ones(4, np.float32), 0.02) == SumOutcome.LATE


def test_an_abort_ends_a_wait(library: RanksLibrary) -> None:
    shared = Shared(library, 2)
    timer = threading.Timer(0.02, shared.abort)
    timer.start()

    assert shared.sum(0, np.ones(4, np.float32), _WAIT_S) == SumOutcome.ABORTED
    timer.join()
