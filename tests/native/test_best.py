"""The best column of each row, against numpy's argmax, with every instruction set that this CPU has."""

from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from engine.fused.structs import declare
from native.engine_library import Threads
from tests.native.built import threads_with

pytestmark = pytest.mark.combinations(2)
_SHAPES = ((1, 1), (3, 7), (2, 511), (5, 512), (4, 513), (64, 1024), (7, 49_152))
Floats = npt.NDArray[np.float32]


@pytest.fixture
def threads(isa: str, num_threads: int) -> Iterator[Threads]:
    with threads_with(isa, num_threads) as threads:
        yield threads


def best(threads: Threads, rows: Floats) -> tuple[list[int], list[float]]:
    columns, scores = array("q", bytes(8 * len(rows))), array("f", bytes(4 * len(rows)))
    declare(threads.library).best(
        threads.address, rows.ctypes.data, *rows.shape, rows.strides[0] // 4, columns.buffer_info()[0],
        scores.buffer_info()[0],
    )  # fmt: skip
    return columns.tolist(), scores.tolist()


@pytest.mark.parametrize("shape", _SHAPES)
def test_the_best_of_each_row_equals_numpys_argmax(threads: Threads, shape: tuple[int, int]) -> None:
    wide = np.random.default_rng(sum(shape)).normal(size=(shape[0], shape[1] + 5)).astype(np.float32)
    rows = wide[:, : shape[1]]  # the gap between rows belongs to none
    wide[:, shape[1] :] = np.inf
    columns, scores = best(threads, rows)
    assert columns == rows.argmax(axis=1).tolist()
    assert scores == rows.max(axis=1).tolist()


def test_the_first_of_equal_scores_is_best(threads: Threads) -> None:
    rows = np.zeros((4, 1500), np.float32)
    rows[1, 700:] = 2.0
    rows[2] = -np.inf
    rows[3, 3], rows[3, 9] = -0.0, 0.0
    rows[3, :3] = -1.0
    assert best(threads, rows)[0] == rows.argmax(axis=1).tolist() == [0, 700, 0, 3]


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])
def test_nan_is_found_before_any_number(threads: Threads, bits: int) -> None:
    rows = np.random.default_rng(1).normal(size=(2, 2000)).astype(np.float32)
    rows[0, 40] = np.inf
    rows[0, 1234:1236] = np.array([bits, bits], np.uint32).view(np.float32)
    columns, scores = best(threads, rows)
    assert columns == rows.argmax(axis=1).tolist()
    assert columns[0] == 1234
    assert np.isnan(scores[0])
    assert scores[1] == rows[1].max()


def test_infinite_scores_are_ordered(threads: Threads) -> None:
    rows = np.full((3, 600), -np.inf, np.float32)
    rows[0, 599] = np.finfo(np.float32).min
    rows[1, 5], rows[1, 6] = np.finfo(np.float32).max, np.inf
    rows[2, 17] = -np.finfo(np.float32).tiny
    assert best(threads, rows) == ([599, 6, 17], [float(rows[0, 599]), np.inf, float(rows[2, 17])])
