"""Extreme values: NaN stays NaN when it is rounded to bfloat16, and silu of a huge gate equals torch's."""

import ctypes

import pytest
import torch

from engine.fused.structs import FinishCode, address, declare
from engine.fused.weights import PackedMemory, packed_bytes
from native.engine_library import EngineLibrary, build_engine

_KERNELS = ("plain", "avx2", "avx512", "avx512_bf16", "amx")  # by number
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_NARROW = ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _SIZE)
_PATTERNS = (
    0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7F80FFFF, 0x7FC00000, 0x7FC00001, 0x7F800000, 0xFF800000,
    0x7F7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F80FFFF, 0x00000001, 0x00008000,
    0x00008001, 0x80000000, 0x80018000,
)  # fmt: skip
_GATES = (
    -80.0, -86.6, -87.5, -88.0, -88.5, -88.7, -89.0, -100.0, -1e4, -1e30, -3e38, -float("inf"), float("nan"), 0.0,
    86.6, 88.0, 100.0, 3e38, float("inf"), -1e-38, 1e-38,
)  # fmt: skip


class LinearKernel(ctypes.Structure):
    """struct linear_kernel, up to the fields that are used here."""

    _fields_ = (
        ("row_format", ctypes.c_uint32), ("tile_rows", ctypes.c_uint32), ("row_unit", ctypes.c_uint32),
        ("begin", _POINTER), ("end", _POINTER), ("tile", _POINTER), ("finish", _POINTER), ("norm", _POINTER),
        ("rotate", _POINTER), ("add", _POINTER), ("narrow", _NARROW),
    )  # fmt: skip


@pytest.fixture(scope="module")
def library(native_libraries: None) -> EngineLibrary:
    return build_engine()


@pytest.fixture(params=_KERNELS)
def kernel(request: pytest.FixtureRequest, library: EngineLibrary) -> int:
    """The address of one instruction set's functions."""
    number = library.functions.linear_kernel_number
    number.argtypes, number.restype = (ctypes.c_uint,), _POINTER
    found = number(_KERNELS.index(request.param))
    if found is None:
        pytest.skip(f"this CPU has no {request.param}")
    return int(found)


def _patterns() -> torch.Tensor:
    """Return floats of random bits: two vectors and a remainder."""
    bits = torch.tensor(_PATTERNS * 2, dtype=torch.int64)[:35]
    return torch.where(bits > 0x7FFFFFFF, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def test_narrowing_rounds_to_even_and_keeps_nan(kernel: int) -> None:
    floats = _patterns()
    halves = torch.zeros(len(floats), dtype=torch.bfloat16)

    LinearKernel.from_address(kernel).narrow(halves.data_ptr(), floats.data_ptr(), len(floats))

    expected = floats.bfloat16()
    numbers = ~floats.isnan()
    assert torch.equal(halves.isnan(), ~numbers)
    assert torch.equal(halves[numbers].view(torch.int16), expected[numbers].view(torch.int16))


def test_a_rounded_sum_keeps_nan(library: EngineLibrary, kernel: int) -> None:
    if LinearKernel.from_address(kernel).row_format:
        pytest.skip("its rounding is AVX512's")
    layer = torch.nn.Linear(2, 32, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    layer.weight.zero_()
    out = _patterns()[:32].clone()[None]
    expected = out.bfloat16().float()

    _multiply(library, kernel, [layer], FinishCode.ADD, torch.zeros(1, 2), out, rounded=True)

    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rounded", [False, True])
def test_silu_of_a_huge_gate_equals_torchs(library: EngineLibrary, kernel: int, rounded: bool) -> None:
    if LinearKernel.from_address(kernel).row_format:
        pytest.skip("its silu is AVX512's")
    gates = torch.tensor(_GATES)
    gate, up = (torch.nn.Linear(2, 32, bias=False).requires_grad_(False) for _ in range(2))
    gate.weight.zero_()
    up.weight.fill_(0.5)
    gate.weight[: len(gates), 0] = gates
    out = torch.zeros(1, 64)

    _multiply(library, kernel, [gate, up], FinishCode.GATED_SILU, torch.tensor([[1.0, 1.0]]), out, rounded=rounded)

    got = out[0, : len(gates)]
    expected = torch.nn.functional.silu(gates.bfloat16() if rounded else gates).float()
    torch.testing.assert_close(got, expected, rtol=2**-7 if rounded else 1e-5, atol=1e-44, equal_nan=True)
    numbers = ~expected.isnan()
    assert torch.equal(got[numbers].signbit(), expected[numbers].signbit())


def _multiply(
    library: EngineLibrary, kernel: int, weights: list[torch.nn.Linear], finish: FinishCode, rows: torch.Tensor,
    out: torch.Tensor, *, rounded: bool,
) -> None:  # fmt: skip
    run = library.functions.linear_run
    run.argtypes = (
        _POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, ctypes.c_int, ctypes.c_uint, ctypes.c_uint,
    )  # fmt: skip
    run.restype = None
    with library.threads(1) as threads:
        memory = PackedMemory(packed_bytes(weights), declare(library), threads)
        linear = memory.pack(weights, finish)
        run(
            address(linear), kernel, rows.data_ptr(), rows.stride(0), len(rows), out.data_ptr(), out.stride(0),
            int(rounded), 0, 1,
        )  # fmt: skip
