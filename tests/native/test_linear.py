"""Products of rows with packed weights: equal to float64 arithmetic, each row's result independent of other rows.

Every kernel of this CPU, both formats, shapes that fill no tile, and every finish code.
"""

import ctypes
from collections.abc import Iterator

import pytest
import torch

from engine.fused.structs import FORMATS, FinishCode, Functions, Linear, address, declare
from engine.fused.weights import PackedMemory, packed_bytes
from native.engine_library import EngineLibrary, Threads, build_engine

_SHAPES = ((1, 2), (16, 6), (33, 64), (96, 130), (320, 64))
_SHAPES_AND_BIAS = [  # every second one in scripts/test
    pytest.param(shape, bias, marks=[pytest.mark.long] if bias == number % 2 else [])
    for number, shape in enumerate(_SHAPES)
    for bias in (False, True)
]
_ROWS = (1, 2, 5, 12, 13, 31, 97)
_KERNELS = ("plain", "avx2", "avx512", "avx512_bf16", "amx")  # by number
_BFLOAT16_ROWS = ("avx512_bf16", "amx")
_BEHIND, _K_UNIT = 32, 32


@pytest.fixture(scope="module")
def library(native_libraries: None) -> EngineLibrary:
    return build_engine()


@pytest.fixture(params=_KERNELS)
def kernel(request: pytest.FixtureRequest, library: EngineLibrary) -> Iterator["Kernel"]:
    with library.threads(1) as threads:
        kernel = Kernel(library, threads, request.param)
        if not kernel.is_here:
            pytest.skip(f"this CPU has no {request.param}")
        yield kernel


class Kernel:
    """linear_run with one instruction set, called as the threads of a team call it."""

    def __init__(self, library: EngineLibrary, threads: Threads, name: str) -> None:
        native, pointer, size = library.functions, ctypes.c_void_p, ctypes.c_size_t
        native.linear_kernel_number.argtypes, native.linear_kernel_number.restype = (ctypes.c_uint,), pointer
        native.linear_run.argtypes = (
            pointer, pointer, pointer, size, size, pointer, size, ctypes.c_int, ctypes.c_uint, ctypes.c_uint,
        )  # fmt: skip
        native.linear_run.restype = None
        self._run, self._kernel = native.linear_run, native.linear_kernel_number(_KERNELS.index(name))
        self._narrow = name in _BFLOAT16_ROWS
        self.functions: Functions = declare(library)
        self.threads = threads

    @property
    def takes_bfloat16_rows(self) -> bool:
        return self._narrow

    @property
    def is_here(self) -> bool:
        return self._kernel is not None

    def pack(self, weights: list[torch.nn.Linear], finish: FinishCode) -> tuple[PackedMemory, Linear]:
        memory = PackedMemory(packed_bytes(weights), self.functions, self.threads)
        return memory, memory.pack(weights, finish)

    def multiply(
        self, linear: Linear, rows: torch.Tensor, out: torch.Tensor, *, rounded: bool = False, num_threads: int = 1
    ) -> torch.Tensor:
        if self._narrow and linear.format == FORMATS[torch.float32]:
            pytest.skip("these instructions are for bfloat16")
        if self._narrow:
            narrow = torch.zeros(len(rows) + _BEHIND, -(-rows.shape[1] // _K_UNIT) * _K_UNIT, dtype=torch.bfloat16)
            narrow[: len(rows), : rows.shape[1]] = rows
            rows = narrow[: len(rows)]
        for thread in range(num_threads):
            self._run(
                address(linear), self._kernel, rows.data_ptr(), rows.stride(0), len(rows), out.data_ptr(),
                out.stride(0), int(rounded), thread, num_threads,
            )  # fmt: skip
        return out


def _layer(columns: int, k: int, dtype: torch.dtype, *, bias: bool = False, seed: int = 0) -> torch.nn.Linear:
    numbers = torch.Generator().manual_seed(seed)
    layer = torch.nn.Linear(k, columns, bias=bias, dtype=dtype).requires_grad_(False)
    layer.weight.copy_(torch.randn(columns, k, generator=numbers) / k**0.5)
    if bias:
        layer.bias.copy_(torch.randn(columns, generator=numbers))
    return layer


def _rows(count: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of `dtype` in float32 rows with gaps between them."""
    numbers = torch.Generator().manual_seed(1)
    padded = torch.full((count, k + 5), float("nan"))
    padded[:, :k] = torch.randn(count, k, generator=numbers).to(dtype)
    return padded[:, :k]


def _exact_product(rows: torch.Tensor, layer: torch.nn.Linear) -> torch.Tensor:
    product = rows.double() @ layer.weight.double().T
    return product if layer.bias is None else product + layer.bias.double()


@pytest.mark.parametrize("dtype", list(FORMATS), ids=str)
@pytest.mark.parametrize(("shape", "bias"), _SHAPES_AND_BIAS, ids=str)
def test_products_equal_float64_arithmetic(
    kernel: Kernel, shape: tuple[int, int], dtype: torch.dtype, bias: bool
) -> None:
    columns, k = shape
    layer = _layer(columns, k, dtype, bias=bias)
    _memory, linear = kernel.pack([layer], FinishCode.STORE)

    for count in _ROWS:
        rows = _rows(count, k, dtype)
        got = kernel.multiply(linear, rows, torch.empty(count, columns + 63))[:, :columns]
        torch.testing.assert_close(got.double(), _exact_product(rows, layer), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [2, 64, 130])
def test_bfloat16_sums_are_added_in_the_order_of_k(kernel: Kernel, k: int) -> None:
    if kernel.takes_bfloat16_rows:
        pytest.skip("these instructions sum in an order of their own")
    layer = _layer(96, k, torch.bfloat16)
    _memory, linear = kernel.pack([layer], FinishCode.STORE)
    rows, weights = _rows(26, k, torch.bfloat16), layer.weight.float()
    expected = torch.zeros(26, 96)
    for i in range(k):  # each product is exact: only its sum is rounded, with or without FMA
        expected += rows[:, i : i + 1] * weights[:, i]

    for count in range(1, 27):
        assert torch.equal(kernel.multiply(linear, rows[:count], torch.empty(count, 96)), expected[:count])


@pytest.mark.parametrize("dtype", list(FORMATS), ids=str)
def test_a_row_does_not_depend_on_other_rows_or_threads(kernel: Kernel, dtype: torch.dtype) -> None:
    _memory, linear = kernel.pack([_layer(96, 130, dtype)], FinishCode.STORE)
    rows = _rows(200, 130, dtype)
    together = kernel.multiply(linear, rows, torch.empty(200, 96))

    for count, num_threads in ((1, 1), (3, 2), (12, 5), (97, 3), (199, 1)):
        some = kernel.multiply(linear, rows[:count], torch.empty(count, 96), num_threads=num_threads)
        assert torch.equal(some, together[:count])


def test_adding_and_rounding_equals_bfloat16(kernel: Kernel) -> None:
    layer = _layer(48, 64, torch.bfloat16)
    _memory, linear = kernel.pack([layer], FinishCode.ADD)
    rows, before = _rows(7, 64, torch.bfloat16), _rows(7, 48, torch.bfloat16)
    out = torch.zeros(7, 64)
    out[:, :48] = before

    got = kernel.multiply(linear, rows, out, rounded=True)[:, :48]

    product = _exact_product(rows, layer).float().bfloat16()
    assert torch.equal(got, (before.bfloat16() + product).float())


@pytest.mark.parametrize("dtype", list(FORMATS), ids=str)
@pytest.mark.parametrize("columns", [96, 40])
def test_gate_and_up_become_one_product(kernel: Kernel, dtype: torch.dtype, columns: int) -> None:
    gate, up = _layer(columns, 64, dtype, bias=True, seed=3), _layer(columns, 64, dtype, seed=4)
    _memory, linear = kernel.pack([gate, up], FinishCode.GATED_SILU)
    rows = _rows(21, 64, dtype) * 8  # far into both tails of the exponential

    got = kernel.multiply(linear, rows, torch.empty(21, 112))[:, :columns]

    expected = torch.nn.functional.silu(_exact_product(rows, gate)) * _exact_product(rows, up)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", list(FORMATS), ids=str)
def test_an_embedding_is_read_back_from_the_packed_weights(kernel: Kernel, dtype: torch.dtype) -> None:
    layer = _layer(320, 64, dtype)
    _memory, linear = kernel.pack([layer], FinishCode.STORE)
    tokens, x = torch.tensor([0, 15, 16, 31, 319]), torch.empty(5, 70)

    kernel.functions.embed(kernel.threads.address, address(linear), tokens.data_ptr(), 5, x.data_ptr(), x.stride(0))

    assert torch.equal(x[:, :64], layer.weight[tokens].float())
