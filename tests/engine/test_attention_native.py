"""What the native kernel guarantees beyond the contract: a sequence's bits depend on nothing but the sequence."""

from array import array
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine.attention.cpu import CpuAttention
from engine.attention.interface import AttentionOptions
from engine.attention.native import NativeAttention, supports
from native.engine_library import EngineLibrary
from tests.engine.attention_case import Case, Sequence, Shape, case_of, make_case, random_sequence
from tests.native.built import built_engine

_SHAPES = {
    "fp32": Shape(num_heads=9, num_kv_heads=3, key_dim=64, value_dim=64),
    "bf16": Shape(9, 3, 64, 64, dtype=torch.bfloat16, pool_dtype=torch.bfloat16),
    "odd": Shape(num_heads=8, num_kv_heads=1, key_dim=40, value_dim=24),
}
_OPTIONS = {
    "plain": AttentionOptions(0.2),
    "window": AttentionOptions(0.2, sliding_window=150),
    "all": AttentionOptions(0.2, sliding_window=70, softcap=20.0, sinks=torch.linspace(-1, 1, 9)),
}


@pytest.fixture(scope="module")
def library() -> EngineLibrary:
    return built_engine()


@pytest.fixture(scope="module", params=["plain", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest, library: EngineLibrary) -> str:
    if request.param not in library.isas:
        pytest.skip(f"this CPU has no {request.param}")
    return str(request.param)


@pytest.fixture(scope="module")
def backend(library: EngineLibrary, isa: str) -> Iterator[NativeAttention]:
    with library.threads(2, isa=isa) as threads:
        yield NativeAttention(threads)


def from_token(sequence: Sequence, start: int, end: int) -> Sequence:
    """Return the sequence when tokens [start, end) are its newest."""
    parts = (part[:, :end] for part in (sequence.query, sequence.keys, sequence.values))
    return Sequence(start, *parts)


@pytest.mark.combinations(2)
@pytest.mark.parametrize("options", _OPTIONS)
@pytest.mark.parametrize("shape", _SHAPES)
def test_token_by_token_or_in_chunks_gives_the_same_bits(backend: NativeAttention, shape: str, options: str) -> None:
    sequence = random_sequence(0, 400, _SHAPES[shape], seed=7)
    chosen = replace(_OPTIONS[options], sinks=None) if shape == "odd" else _OPTIONS[options]

    whole = case_of([sequence], _SHAPES[shape]).run(backend, chosen)
    chunks = [
        case_of([from_token(sequence, start, end)], _SHAPES[shape]).run(backend, chosen)
        for start, end in [(0, 1), (1, 130), (130, 131), (131, 256), (256, 399), (399, 400)]
    ]

    assert torch.equal(torch.cat(chunks), whole)


@pytest.mark.parametrize("options", _OPTIONS)
def test_neighbours_do_not_change_bits(backend: NativeAttention, options: str) -> None:
    parts = [(287, 1), (0, 90), (700, 1), (130, 7), (5, 1)]
    together = make_case(parts, _SHAPES["bf16"])

    batch = together.run(backend, _OPTIONS[options])

    alone = [case_of([sequence], together.shape).run(backend, _OPTIONS[options]) for sequence in together.sequences]
    assert torch.equal(torch.cat(alone), batch)


@pytest.mark.parametrize("parts", [[(2000, 1)], [(1000, 1)] * 3, [(300, 200)]], ids=str)
def test_the_number_of_threads_does_not_change_bits(library: EngineLibrary, parts: list[tuple[int, int]]) -> None:
    case, outputs = make_case(parts, _SHAPES["fp32"]), []

    for count in (1, 2, 5, 64):
        with library.threads(count) as threads:
            outputs.append(case.run(NativeAttention(threads), _OPTIONS["all"]))

    assert all(torch.equal(output, outputs[0]) for output in outputs[1:])
    torch.testing.assert_close(outputs[0], case.expected(_OPTIONS["all"]), rtol=1e-4, atol=1e-5)


def test_one_workspace_serves_steps_of_any_size(backend: NativeAttention) -> None:
    options = AttentionOptions(0.1)
    for parts, shape in [([(3, 1)], _SHAPES["odd"]), ([(0, 300)], _SHAPES["fp32"]), ([(500, 1)] * 5, _SHAPES["odd"])]:
        case = make_case(parts, shape)

        torch.testing.assert_close(case.run(backend, options), case.expected(options), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)], ids=str)
def test_queries_may_have_any_strides(backend: NativeAttention, order: tuple[int, int, int]) -> None:
    case = make_case([(20, 30)], Shape())
    pool, (sequence,) = case.pool_with_past(), case.sequences
    step, options = backend.plan(case.metadata), AttentionOptions(0.3)
    query, keys, values = (
        new[:, 20:].permute(order).contiguous().permute([order.index(dim) for dim in range(3)])
        for new in (sequence.query, sequence.keys, sequence.values)
    )

    step.write(pool.keys, pool.values, keys, values)

    torch.testing.assert_close(step.attend(query, pool.keys, pool.values, options), case.expected(options))


def broken(case: Case, **columns: list[int]) -> Case:
    """Return the case with other numbers in its packed arrays."""
    for name, numbers in columns.items():
        packed = getattr(case.metadata.packed, name)
        packed[:] = array(packed.typecode, numbers)
    return case


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"blocks": [0, 1, 999]}, "a block or slot is outside the pool"),
        ({"blocks": [0, -1, 2]}, "a block or slot is outside the pool"),
        ({"slots": [9999]}, "a block or slot is outside the pool"),
        ({"kv_lengths": [49]}, "a shape or length is wrong"),
        ({"kv_lengths": [0]}, "a shape or length is wrong"),
    ],
)
def test_slots_outside_the_pool_are_refused(
    backend: NativeAttention, columns: dict[str, list[int]], message: str
) -> None:
    case = broken(make_case([(40, 1)], Shape()), **columns)

    with pytest.raises(ValueError, match=message):
        case.run(backend, AttentionOptions(0.3))


def test_a_closed_team_or_memory_raises(library: EngineLibrary) -> None:
    case, team = make_case([(3, 1)], Shape()), library.threads(2)
    backend = NativeAttention(team)
    team.close()
    with pytest.raises(ValueError, match="the team of threads is closed"):
        case.run(backend, AttentionOptions(0.3))

    with library.threads(2) as other:
        backend = NativeAttention(other)
        backend.memory.close()
        with pytest.raises(ValueError, match="attention's memory is closed"):
            case.run(backend, AttentionOptions(0.3))


def test_layers_that_the_kernel_does_not_support_go_to_torch(library: EngineLibrary) -> None:
    shape, options = Shape(key_dim=12, value_dim=20), AttentionOptions(0.3)
    case = make_case([(9, 1), (0, 18)], shape)
    pool = case.pool_with_past()

    with library.threads(2) as threads:
        got = case.run(CpuAttention(threads), options)

    assert not supports(case.sequences[0].query, pool.keys, pool.values)
    torch.testing.assert_close(got, case.expected(options), rtol=1e-4, atol=1e-5)


def test_without_native_kernels_torch_attends() -> None:
    case, options = make_case([(9, 1), (0, 18)], Shape()), AttentionOptions(0.3)

    torch.testing.assert_close(case.run(CpuAttention(), options), case.expected(options), rtol=1e-4, atol=1e-5)
