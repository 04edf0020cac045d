"""One contract for every attention backend: paged attention equals dense attention over each whole sequence."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from engine.attention.interface import AttentionBackend, AttentionOptions
from engine.attention.native import NativeAttention
from engine.attention.paged import LayerPool, PagedAttention
from engine.attention.reference import ReferenceAttention
from engine.attention.torch_cpu import TorchCpuAttention
from engine.interface import BatchSequence, StepBatch
from engine.step_metadata import StepMetadata, build
from native.cache import NoNative
from native.engine_library import Threads, build_engine

_HEAD_DIM = 8
_NUM_BLOCKS = 40
_CPU = torch.device("cpu")

# (start, count) of each sequence in one step
_BATCHES = {
    "prefill": [(0, 37)],
    "prefill-one-token": [(0, 1)],
    "chunked-prefill": [(16, 21)],
    "two-prefills": [(0, 5), (0, 33)],
    "decode": [(40, 1)],
    "decode-batch": [(3, 1), (16, 1), (15, 1), (70, 1), (0, 1), (64, 1)],
    "mixed": [(9, 1), (0, 18), (33, 1), (20, 30), (1, 1)],
}


@dataclass(frozen=True, slots=True)
class _Sequence:
    """The oracle's view of one sequence: all its keys, values and queries, [heads, kv_length, dim]."""

    start: int
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@pytest.fixture(scope="module", params=["reference", "torch", "native-plain", "native-avx2", "native-avx512"])
def backend(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    """Every backend; the native kernel with each instruction set this CPU has, in three threads."""
    kind, _, isa = request.param.partition("-")
    if kind == "native":
        with native_threads(isa) as threads:
            yield NativeAttention(threads)
    else:
        yield ReferenceAttention() if kind == "reference" else TorchCpuAttention()


def native_threads(isa: str | None = None, count: int = 3) -> Threads:
    try:
        library = build_engine()
    except NoNative as error:
        pytest.skip(f"missing tool: no native kernels here: {error}")
    if isa is not None and isa not in library.isas:
        pytest.skip(f"this CPU has no {isa}")
    return library.threads(count, isa=isa)


def _dense(sequence: _Sequence, options: AttentionOptions) -> torch.Tensor:
    """Textbook attention, one query at a time, in float64: [count, num_heads, dim]."""
    group = sequence.query.shape[0] // sequence.keys.shape[0]
    rows = []
    for position in range(sequence.start, sequence.keys.shape[1]):
        first = 0 if options.sliding_window is None else max(0, position + 1 - options.sliding_window)
        heads = []
        for head in range(sequence.query.shape[0]):
            keys = sequence.keys[head // group, first : position + 1].double()
            scores = keys @ sequence.query[head, position].double() * options.scaling
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            weights = scores.exp()
            total = weights.sum() + (0 if options.sinks is None else options.sinks[head].double().exp())
            heads.append(weights / total @ sequence.values[head // group, first : position + 1].double())
        rows.append(torch.stack(heads))
    return torch.stack(rows).float()


def _run(
    backend: AttentionBackend,
    shape: list[tuple[int, int]],
    options: AttentionOptions,
    *,
    block_size: int = 16,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    contiguous: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the backend and the oracle make of one step, both [num_tokens, num_heads, dim]."""
    torch.manual_seed(1)
    sequences = [_random_sequence(start, count, num_heads, num_kv_heads) for start, count in shape]
    metadata = _metadata(shape, block_size, contiguous)
    pool = _pool_with_past(sequences, metadata, num_kv_heads)
    paged = PagedAttention([pool], backend)
    query, keys, values = (
        torch.cat([getattr(s, name)[:, s.start :] for s in sequences], dim=1) for name in ("query", "keys", "values")
    )
    paged.begin(metadata, None)
    got = paged.run_layer(0, query, keys, values, options)
    return got, torch.cat([_dense(sequence, options) for sequence in sequences])


def _random_sequence(start: int, count: int, num_heads: int, num_kv_heads: int) -> _Sequence:
    length = start + count
    keys, values = torch.randn(num_kv_heads, length, _HEAD_DIM), torch.randn(num_kv_heads, length, _HEAD_DIM)
    return _Sequence(start, torch.randn(num_heads, length, _HEAD_DIM), keys, values)


def _metadata(shape: list[tuple[int, int]], block_size: int, contiguous: bool) -> StepMetadata:
    free = list(range(_NUM_BLOCKS))
    if not contiguous:
        random.Random(4).shuffle(free)
    parts = []
    for start, count in shape:
        needed = -(-(start + count) // block_size)
        parts.append(BatchSequence(start, count, tuple(free[:needed])))
        free = free[needed:]
    num_tokens = sum(count for _, count in shape)
    return build(StepBatch((0,) * num_tokens, tuple(parts), ()), block_size=block_size, device=_CPU)


def _pool_with_past(sequences: list[_Sequence], metadata: StepMetadata, num_kv_heads: int) -> LayerPool:
    """Lay down what earlier steps wrote; NaN everywhere else, so that reading a foreign slot shows."""
    shape = (_NUM_BLOCKS * metadata.block_size, num_kv_heads, _HEAD_DIM)
    pool = LayerPool(torch.full(shape, float("nan")), torch.full(shape, float("nan")))
    for sequence, span in zip(sequences, metadata.spans, strict=True):
        for token in range(span.start):
            slot = span.block_ids[token // metadata.block_size] * metadata.block_size + token % metadata.block_size
            pool.keys[slot] = sequence.keys[:, token]
            pool.values[slot] = sequence.values[:, token]
    return pool


@pytest.mark.parametrize("contiguous", [False, True], ids=["scattered", "contiguous"])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("batch", _BATCHES)
def test_paged_equals_dense(backend: AttentionBackend, batch: str, block_size: int, contiguous: bool) -> None:
    got, expected = _run(backend, _BATCHES[batch], AttentionOptions(0.35), block_size=block_size, contiguous=contiguous)

    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 1), (9, 3)])
@pytest.mark.parametrize("batch", ["prefill", "decode-batch", "mixed"])
def test_query_heads_share_kv_heads(backend: AttentionBackend, batch: str, num_heads: int, num_kv_heads: int) -> None:
    options = AttentionOptions(0.35)

    got, expected = _run(backend, _BATCHES[batch], options, num_heads=num_heads, num_kv_heads=num_kv_heads)

    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 7, 16, 1000])
@pytest.mark.parametrize("batch", _BATCHES)
def test_sliding_window_hides_what_is_behind_it(backend: AttentionBackend, batch: str, window: int) -> None:
    got, expected = _run(backend, _BATCHES[batch], AttentionOptions(0.35, sliding_window=window))

    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", ["chunked-prefill", "decode-batch", "mixed"])
def test_softcap_and_sinks_take_part_in_the_softmax(backend: AttentionBackend, batch: str) -> None:
    options = AttentionOptions(0.35, sliding_window=20, softcap=2.0, sinks=torch.tensor([0.1, 2.0, -1.0, 0.5]))

    got, expected = _run(backend, _BATCHES[batch], options)

    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_layers_with_different_windows_share_one_step(backend: AttentionBackend) -> None:
    metadata = _metadata([(20, 1), (0, 30)], 16, contiguous=False)
    zeros = (torch.zeros(_NUM_BLOCKS * 16, 2, _HEAD_DIM) for _ in range(4))
    pools = [LayerPool(next(zeros), next(zeros)) for _ in range(2)]
    paged = PagedAttention(pools, backend)
    seen: list[int] = []
    query, keys, values = torch.randn(4, 31, 8), torch.randn(2, 31, 8), torch.randn(2, 31, 8)

    paged.begin(metadata, seen.append)
    full = paged.run_layer(0, query, keys, values, AttentionOptions(0.35))
    windowed = paged.run_layer(1, query, keys, values, AttentionOptions(0.35, sliding_window=3))

    assert seen == [0, 1]
    assert not torch.allclose(full, windowed)
    torch.testing.assert_close(full[1:4], windowed[1:4])  # the prompt's first three tokens see the same keys
