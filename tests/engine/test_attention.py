"""One contract for every attention backend: paged attention equals dense attention over each whole sequence."""

from collections.abc import Callable, Iterator

import pytest
import torch

from engine.attention.cuda import CudaAttention
from engine.attention.interface import AttentionBackend, AttentionOptions
from engine.attention.native import NativeAttention
from engine.attention.paged import PagedAttention
from engine.attention.reference import ReferenceAttention
from engine.attention.torch_cpu import TorchCpuAttention
from tests.devices.every_device import ACCELERATORS, attention_of
from tests.engine.attention_case import Shape, make_case
from tests.native.built import threads_with

pytestmark = pytest.mark.combinations(2)
# (start, count) of each sequence in one step
_BATCHES = {
    "prefill": [(0, 37)],
    "prefill-one-token": [(0, 1)],
    "chunked-prefill": [(16, 21)],
    "two-prefills": [(0, 5), (0, 33)],
    "decode": [(40, 1)],
    "decode-batch": [(3, 1), (16, 1), (15, 1), (70, 1), (0, 1), (64, 1)],
    "mixed": [(9, 1), (0, 18), (33, 1), (20, 30), (1, 1)],
    "long": [(300, 1), (129, 140), (127, 1), (0, 131)],
}


_MAKERS: dict[str, Callable[[], AttentionBackend]] = {
    "reference": ReferenceAttention,
    "torch": TorchCpuAttention,
    "cuda": CudaAttention,
}
_BACKENDS = [*_MAKERS, "native-plain", "native-avx2", "native-avx512"]
_ON_DEVICES = [pytest.param(f"on-{one.values[0]}", marks=one.marks) for one in ACCELERATORS if one.values != ("fake",)]


@pytest.fixture(scope="module", params=[*_BACKENDS, *_ON_DEVICES])
def backend(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    """Every backend, each device's own there; the native kernel with each instruction set of this CPU, in 3 threads."""
    kind, _, which = request.param.partition("-")
    if kind == "native":
        with threads_with(which, 3) as threads:
            yield NativeAttention(threads)
    elif kind == "on":
        yield attention_of(which)
    else:
        yield _MAKERS[kind]()


def check(
    backend: AttentionBackend, batch: str, options: AttentionOptions, shape: Shape, *, contiguous: bool = False
) -> None:
    case = make_case(_BATCHES[batch], shape, contiguous=contiguous)

    got = case.run(backend, options)

    assert got.dtype == shape.dtype
    rough = shape.dtype == torch.bfloat16
    torch.testing.assert_close(
        got.float(), case.expected(options), rtol=1e-2 if rough else 1e-4, atol=1e-2 if rough else 1e-5
    )


@pytest.mark.parametrize("contiguous", [False, True], ids=["scattered", "contiguous"])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("batch", _BATCHES)
def test_paged_equals_dense(backend: AttentionBackend, batch: str, block_size: int, contiguous: bool) -> None:
    check(backend, batch, AttentionOptions(0.35), Shape(block_size=block_size), contiguous=contiguous)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 1), (9, 3), (16, 2), (72, 1)])
@pytest.mark.parametrize("batch", ["prefill", "decode-batch", "mixed"])
def test_query_heads_share_kv_heads(backend: AttentionBackend, batch: str, num_heads: int, num_kv_heads: int) -> None:
    check(backend, batch, AttentionOptions(0.35), Shape(num_heads, num_kv_heads))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (24, 40), (192, 128), (256, 256), (72, 8)])
@pytest.mark.parametrize("batch", ["decode-batch", "long"])
def test_keys_and_values_have_their_own_dims(
    backend: AttentionBackend, batch: str, key_dim: int, value_dim: int
) -> None:
    check(backend, batch, AttentionOptions(0.1), Shape(key_dim=key_dim, value_dim=value_dim))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16-rows", "fp32-rows"])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (24, 40)])
@pytest.mark.parametrize("batch", ["mixed", "long"])
def test_a_bf16_pool_is_attended_in_float32(
    backend: AttentionBackend, batch: str, key_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    shape = Shape(key_dim=key_dim, value_dim=value_dim, dtype=dtype, pool_dtype=torch.bfloat16)

    check(backend, batch, AttentionOptions(0.1), shape)


@pytest.mark.parametrize("window", [1, 7, 64, 1000])
@pytest.mark.parametrize("batch", ["chunked-prefill", "decode-batch", "mixed", "long"])
def test_a_sliding_window_hides_older_keys(backend: AttentionBackend, batch: str, window: int) -> None:
    check(backend, batch, AttentionOptions(0.35, sliding_window=window), Shape())


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("batch", ["chunked-prefill", "decode-batch", "mixed", "long"])
def test_softcap_and_sinks_take_part_in_the_softmax(backend: AttentionBackend, batch: str, window: int | None) -> None:
    sinks = torch.tensor([0.1, 2.0, -1.0, 0.5])

    check(backend, batch, AttentionOptions(0.35, sliding_window=window, softcap=2.0, sinks=sinks), Shape())
    check(backend, batch, AttentionOptions(0.35, sliding_window=window, softcap=50.0), Shape())
    check(backend, batch, AttentionOptions(0.35, sliding_window=window, sinks=sinks.bfloat16()), Shape())


@pytest.mark.parametrize("batch", ["prefill", "decode-batch"])
def test_large_scores_do_not_overflow(backend: AttentionBackend, batch: str) -> None:
    case = make_case(_BATCHES[batch], Shape())

    got = case.run(backend, AttentionOptions(300.0))  # the best key takes all, to float32's precision

    assert got.isfinite().all()
    for sequence, (rows, _) in zip(case.sequences, case.metadata.rows(), strict=True):
        scores = sequence.query[0, -1] @ sequence.keys[0].T
        torch.testing.assert_close(got[rows][-1, 0], sequence.values[0, scores.argmax()], rtol=1e-2, atol=1e-2)


def test_only_the_steps_own_slots_are_written(backend: AttentionBackend) -> None:
    case = make_case(_BATCHES["mixed"], Shape())
    pool, before = case.pool_with_past(), case.pool_with_past()
    new_keys, new_values = torch.randn(2, 51, 8), torch.randn(2, 51, 8)
    mine = case.metadata.slots

    backend.plan(case.metadata).write(pool.keys, pool.values, new_keys, new_values)

    for got, old, new in ((pool.keys, before.keys, new_keys), (pool.values, before.values, new_values)):
        torch.testing.assert_close(got[mine], new.transpose(0, 1), rtol=0, atol=0)
        old[mine] = got[mine]
        torch.testing.assert_close(got, old, rtol=0, atol=0, equal_nan=True)


def test_new_tokens_are_rounded_to_the_pools_dtype(backend: AttentionBackend) -> None:
    case = make_case([(0, 200)], Shape(pool_dtype=torch.bfloat16))
    pool = case.pool_with_past()
    new = torch.randn(2, 200, 8) * torch.logspace(-40, 38, 200)[:, None]
    new[0, 0, :3] = torch.tensor([float("inf"), float("nan"), -0.0])

    backend.plan(case.metadata).write(pool.keys, pool.values, new, new)

    expected = new.transpose(0, 1).bfloat16()
    torch.testing.assert_close(pool.keys[case.metadata.slots], expected, rtol=0, atol=0, equal_nan=True)


def test_layers_with_different_windows_share_one_step(backend: AttentionBackend) -> None:
    case = make_case([(20, 1), (0, 30)], Shape())
    paged = PagedAttention([case.pool_with_past(), case.pool_with_past()], backend)
    seen: list[int] = []
    query, keys, values = torch.randn(4, 31, 8), torch.randn(2, 31, 8), torch.randn(2, 31, 8)

    paged.begin(case.metadata, seen.append)
    full = paged.run_layer(0, query, keys, values, AttentionOptions(0.35))
    windowed = paged.run_layer(1, query, keys, values, AttentionOptions(0.35, sliding_window=3))

    assert seen == [0, 1]
    assert not torch.allclose(full, windowed)
    torch.testing.assert_close(full[1:4], windowed[1:4])  # the prompt's first three tokens see the same keys
