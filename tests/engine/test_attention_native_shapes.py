"""Shapes that do not fit the step or its pool are refused before the kernel reads by them."""

import ctypes
from array import array
from collections.abc import Iterator

import pytest
import torch

from engine.attention.interface import AttentionOptions
from engine.attention.native import NativeAttention
from native.attention import WRITE, AttentionLayer, AttentionMemory, step_of
from tests.engine.attention_case import Shape, make_case
from tests.native.built import built_engine

_OPTIONS = AttentionOptions(0.3)


@pytest.fixture(scope="module")
def backend() -> Iterator[NativeAttention]:
    with built_engine().threads(2) as threads:
        yield NativeAttention(threads)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, 4, 8), r"shape of query is \[4, 4, 8\], but must be \[4, 3, 8\]"),
        ((4, 2, 8), r"shape of query is \[4, 2, 8\], but must be \[4, 3, 8\]"),
        ((4, 3, 16), r"shape of query is \[4, 3, 16\], but must be \[4, 3, 8\]"),
        ((3, 3, 8), "3 query heads are not a multiple of the pool's 2 KV heads"),
        ((12, 8), r"shape of query is \[12, 8\], but must be \[12, 3, 8\]"),
    ],
    ids=str,
)
def test_a_query_of_another_shape_is_refused(backend: NativeAttention, shape: tuple[int, ...], message: str) -> None:
    case = make_case([(20, 3)], Shape())
    pool = case.pool_with_past()

    with pytest.raises(ValueError, match=message):
        backend.plan(case.metadata).attend(torch.zeros(shape), pool.keys, pool.values, _OPTIONS)


def test_table_ends_that_wrap_around_are_refused() -> None:
    ends, lengths, tables = array("i", [1, 2]), array("i", [1, 1]), array("i", [1, -(1 << 31)])
    step = step_of(ends, lengths, tables, array("i", [0]), array("q", [0, 0]), block_size=16, num_blocks=1)
    layer = AttentionLayer(ctypes.addressof(step), num_heads=1, num_kv_heads=1, key_dim=8, value_dim=8)

    wrong = pytest.raises(ValueError, match="a shape or length is wrong")
    with built_engine().threads(1) as threads, AttentionMemory(threads) as memory, wrong:
        memory.run(layer, WRITE)


def test_a_steps_arrays_keep_their_size_during_the_step() -> None:
    arrays = [array("i", [1]), array("i", [1]), array("i", [1]), array("i", [0]), array("q")]
    step = step_of(*arrays, block_size=16, num_blocks=1)

    for column in arrays:
        with pytest.raises(BufferError):
            column.append(1)
    del step
    for column in arrays:
        column.append(1)


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        ((2, 2, 8), (2, 3, 8), r"shape of new keys is \[2, 2, 8\], but must be \[2, 3, 8\]"),
        ((2, 3, 8), (2, 4, 8), r"shape of new values is \[2, 4, 8\], but must be \[2, 3, 8\]"),
        ((1, 3, 8), (2, 3, 8), r"shape of new keys is \[1, 3, 8\], but must be \[2, 3, 8\]"),
        ((2, 3, 8), (2, 3, 16), r"shape of new values is \[2, 3, 16\], but must be \[2, 3, 8\]"),
    ],
    ids=str,
)
def test_new_rows_of_another_shape_are_refused(
    backend: NativeAttention, keys: tuple[int, ...], values: tuple[int, ...], message: str
) -> None:
    case = make_case([(20, 3)], Shape())
    pool = case.pool_with_past()
    before = pool.keys.clone()

    with pytest.raises(ValueError, match=message):
        backend.plan(case.metadata).write(pool.keys, pool.values, torch.zeros(keys), torch.zeros(values))
    torch.testing.assert_close(pool.keys, before, equal_nan=True, rtol=0, atol=0)


def test_pools_that_differ_are_refused(backend: NativeAttention) -> None:
    case = make_case([(20, 3)], Shape())
    pool, query = case.pool_with_past(), torch.zeros(4, 3, 8)
    step = backend.plan(case.metadata)

    with pytest.raises(ValueError, match="the same slots and heads"):
        step.attend(query, pool.keys, pool.values[:-16], _OPTIONS)
    with pytest.raises(ValueError, match=r"keys of torch\.float32 and values of torch\.bfloat16: both must be one of"):
        step.attend(query, pool.keys, pool.values.bfloat16(), _OPTIONS)
    with pytest.raises(ValueError, match=r"dtype of query is torch\.float64, but must be one of"):
        step.attend(query.double(), pool.keys, pool.values, _OPTIONS)


def test_there_is_one_sink_for_each_head(backend: NativeAttention) -> None:
    case = make_case([(20, 3)], Shape())
    pool = case.pool_with_past()

    with pytest.raises(ValueError, match=r"shape of sinks is \[3\], but must be \[4\]"):
        backend.plan(case.metadata).attend(
            torch.zeros(4, 3, 8), pool.keys, pool.values, AttentionOptions(0.3, sinks=torch.zeros(3))
        )


def test_a_later_layer_with_a_smaller_pool_is_refused(backend: NativeAttention) -> None:
    case = make_case([(40, 1)], Shape())
    pool, query = case.pool_with_past(), torch.zeros(4, 1, 8)
    step = backend.plan(case.metadata)
    step.attend(query, pool.keys, pool.values, _OPTIONS)

    with pytest.raises(ValueError, match="a block or slot is outside the pool"):
        step.attend(query, pool.keys[:16], pool.values[:16], _OPTIONS)
