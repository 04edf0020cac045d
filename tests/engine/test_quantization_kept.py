"""Kernels for layers that stay quantised: the CPU's against plain arithmetic, the calls of the card's by its rules."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.quantization import kept_int4pack
from engine.quantization.interface import EvenGroups, Grouped
from engine.quantization.kept import KeptFormat, KeptLinear, KeptWeight, kept_weight
from engine.quantization.kept_check import disagreement
from engine.quantization.kept_int4pack import MANY_ROWS, ON_CARD, ON_HOST, Int4Format, Int4Kernel
from engine.quantization.kept_rounded import FLOAT8_BY_TORCH, INT8_BY_TORCH, RoundedFormat, round_by_token
from engine.quantization.kept_table import EXPERTS, FORMATS, experts_named, formats_named
from tests.devices.fake_device import TRAITS
from tests.engine.card_int4 import CardInt4

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_F32 = torch.float32


def int4_layer(outputs: int, inputs: int, size: int, *, seed: int = 0, powers: bool = False) -> Grouped:
    """A random 4-bit weight; with `powers` its scales are powers of two, so that every dtype holds all of it."""
    numbers = torch.Generator().manual_seed(seed)
    shape = (outputs, inputs // size)
    scales = torch.rand(shape, generator=numbers) * 0.05 + 0.01
    if powers:
        scales = torch.ldexp(torch.ones(shape), torch.randint(-6, -2, shape, generator=numbers))
    codes, zeros = (torch.randint(0, 16, of, generator=numbers, dtype=torch.uint8) for of in ((outputs, inputs), shape))
    return Grouped(codes, scales.half(), zeros, EvenGroups(size))


def int8_layer(outputs: int, inputs: int, *, seed: int = 0) -> Grouped:
    """A random symmetric int8 weight with one scale per output."""
    numbers = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (outputs, inputs), generator=numbers, dtype=torch.int8)
    return Grouped(codes, torch.rand(outputs, 1, generator=numbers).half() * 0.01 + 1e-3, None, EvenGroups(inputs))


def float8_layer(outputs: int, inputs: int) -> Grouped:
    """A random float8 weight with one scale per output."""
    numbers = torch.Generator().manual_seed(7)
    codes = torch.randn(outputs, inputs, generator=numbers).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Grouped(codes, torch.rand(outputs, 1, generator=numbers) * 0.01 + 1e-3, None, EvenGroups(inputs))


def whole(grouped: Grouped, *, rounded_inputs: torch.dtype | None = None) -> KeptWeight:
    weight = kept_weight(grouped, rounded_inputs=rounded_inputs)
    assert isinstance(weight, KeptWeight), weight
    return weight


def matrix_of(grouped: Grouped) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """The weight in float64."""
    codes, scales = grouped.codes.double().numpy(), grouped.scales.double().numpy()
    assert isinstance(grouped.groups, EvenGroups)
    zeros = np.zeros(scales.shape) if grouped.zeros is None else grouped.zeros.double().numpy()
    groups = np.arange(codes.shape[1]) // grouped.groups.size
    return np.asarray((codes - zeros[:, groups]) * scales[:, groups])


def unit(dtype: torch.dtype) -> float:
    """The largest rounding error of a number, relative to the number."""
    return float(torch.finfo(dtype).eps) / 2


def rows_of(count: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(5)).to(dtype)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs", "size"), [(64, 96, 32), (32, 256, 64), (80, 256, 128), (16, 512, 256)])
def test_int4_products_are_within_their_roundings(outputs: int, inputs: int, size: int, dtype: torch.dtype) -> None:
    """Scale, zero and their sum are rounded once each: no weight moves by more than u (16 scale + |weight|)."""
    grouped, rows = int4_layer(outputs, inputs, size), rows_of(7, inputs, dtype)
    matrix, values = matrix_of(grouped), np.abs(rows.double().numpy())
    scales = np.repeat(grouped.scales.double().numpy(), size, axis=1)

    got = Int4Format(ON_HOST).pack(whole(grouped), dtype)(rows)

    assert got.dtype == dtype
    exact = rows.double().numpy() @ matrix.T
    of_weights = values @ (unit(dtype) * (16 * scales + np.abs(matrix))).T
    of_sums = (inputs * unit(torch.float32) + unit(dtype)) * (values @ np.abs(matrix).T) * 1.01
    assert (np.abs(got.double().numpy() - exact) <= of_weights * 1.01 + of_sums).all()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_int4_is_exact_where_the_dtype_holds_scales_and_zeros(dtype: torch.dtype) -> None:
    grouped = int4_layer(32, 64, 32, powers=True)

    got = Int4Format(ON_HOST).pack(whole(grouped), dtype)(torch.eye(64, dtype=dtype))

    assert np.array_equal(got.double().numpy(), matrix_of(grouped).T)


@pytest.mark.parametrize("count", [1, 16, 17, 40])
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_int8_products_are_exact_but_for_the_rounding_of_inputs(count: int, dtype: torch.dtype) -> None:
    grouped, rows = int8_layer(24, 96), rows_of(count, 96, dtype)
    values = rows.double().numpy()
    steps = np.abs(values).max(1, keepdims=True) / 127
    rounded = np.round(rows.float().numpy() / steps.astype(np.float32))

    got = RoundedFormat(INT8_BY_TORCH).pack(whole(grouped, rounded_inputs=torch.int8), dtype)(rows).double().numpy()

    matrix = matrix_of(grouped)
    assert got == pytest.approx(rounded @ matrix.T * steps, rel=4 * unit(torch.float32) + unit(dtype))
    assert (np.abs(rounded @ matrix.T * steps - values @ matrix.T) <= steps / 2 * 1.001 * np.abs(matrix).sum(1)).all()


@pytest.mark.parametrize("count", [1, 16, 40])
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_float8_products_are_those_of_rounded_inputs(count: int, dtype: torch.dtype) -> None:
    grouped, rows = float8_layer(48, 96), rows_of(count, 96, dtype)
    steps = rows.float().abs().amax(1, keepdim=True) / 448
    rounded = (rows.float() / steps).to(torch.float8_e4m3fn).double() * steps.double()
    weight, form = whole(grouped, rounded_inputs=torch.float8_e4m3fn), RoundedFormat(FLOAT8_BY_TORCH)
    assert form.handles(weight)
    assert form.lacking(weight, dtype) is None

    got = form.pack(weight, dtype)(rows).double().numpy()

    matrix, unit_of_sums = matrix_of(grouped), 96 * unit(torch.float32) + unit(dtype)
    bound = 1.01 * unit_of_sums * np.abs(rounded.numpy()) @ np.abs(matrix).T
    assert (np.abs(got - rounded.numpy() @ matrix.T) <= bound).all()
    assert disagreement(_layer(weight, form, dtype), grouped, weight, form, dtype) is None


def _layer(weight: KeptWeight, form: KeptFormat, dtype: torch.dtype) -> KeptLinear:
    outputs, inputs = weight.shape
    return KeptLinear(nn.Linear(inputs, outputs, bias=False), form.pack(weight, dtype), weight.order)


def test_a_float8_kernel_with_another_scale_is_not_kept() -> None:
    grouped, form = float8_layer(48, 256), RoundedFormat(FLOAT8_BY_TORCH)
    weight = whole(grouped, rounded_inputs=torch.float8_e4m3fn)

    assert _compared(grouped, weight, form, weight) is None
    assert _compared(grouped, weight, form, replace(weight, scales=weight.scales * 1.3)) is not None
    assert _compared(grouped, weight, form, replace(weight, scales=weight.scales.roll(1, 0))) is not None


def test_float8_sizes_are_those_that_torchs_shape_function_takes() -> None:
    for outputs, inputs in ((40, 96), (48, 88)):
        weight = whole(float8_layer(outputs, inputs), rounded_inputs=torch.float8_e4m3fn)
        lacking = RoundedFormat(FLOAT8_BY_TORCH).lacking(weight, torch.bfloat16)
        assert lacking == f"float8 multiplication supports multiples of 16 x 16, not {outputs} x {inputs}"
    with FakeTensorMode():
        codes = torch.empty(48, 96, dtype=torch.float8_e4m3fn, device="cuda")
        product = FLOAT8_BY_TORCH.multiply(torch.empty(3, 96, device="cuda"), codes, torch.empty(48, device="cuda"))
        assert product.shape == (3, 48)
        odd = torch.empty(48, 88, dtype=torch.float8_e4m3fn, device="cuda")
        with pytest.raises(RuntimeError, match="divisible by 16"):
            FLOAT8_BY_TORCH.multiply(torch.empty(3, 88, device="cuda"), odd, torch.empty(48, device="cuda"))


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_token_of_zeros_stays_zeros(codes: torch.dtype) -> None:
    rounded, steps = round_by_token(torch.zeros(2, 8), codes)

    assert not rounded.float().any()
    assert not steps.any()


def test_inputs_of_a_group_may_be_anywhere() -> None:
    """Act order: columns are sorted by group once, inputs at every call."""
    even = int4_layer(32, 64, 32)
    mixed = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    grouped = replace(even, codes=even.codes[:, mixed], groups=mixed // 32)
    weight, rows = whole(grouped), rows_of(3, 64, torch.float32)

    kept = KeptLinear(nn.Linear(64, 32, bias=False), Int4Format(ON_HOST).pack(weight, torch.float32), weight.order)

    expected = rows.double().numpy() @ matrix_of(even)[:, mixed.numpy()].T
    assert kept(rows).double().numpy() == pytest.approx(expected, abs=1e-4)


def test_groups_of_different_sizes_are_padded() -> None:
    """Columns of padding may have any weight: their input is 0."""
    grouped, rows = replace(int4_layer(32, 64, 32), groups=torch.tensor([0, 1] * 24 + [0] * 16)), rows_of(3, 64, _F32)
    weight = whole(grouped)
    assert grouped.zeros is not None

    kept = KeptLinear(nn.Linear(64, 32, bias=False), Int4Format(ON_HOST).pack(weight, _F32), weight.order)

    groups = np.array([0, 1] * 24 + [0] * 16)
    codes, scales, zeros = (one.double().numpy() for one in (grouped.codes, grouped.scales, grouped.zeros))
    matrix = (codes - zeros[:, groups]) * scales[:, groups]
    assert weight.shape == (32, 96)
    assert kept(rows).double().numpy() == pytest.approx(rows.double().numpy() @ matrix.T, abs=1e-4)
    assert _compared(grouped, weight, Int4Format(ON_HOST), weight) is None


@pytest.mark.parametrize(
    ("grouped", "dtype", "said"),
    [
        (int4_layer(32, 64, 16), torch.bfloat16, "int4pack supports groups of 32, 64, 128, 256 inputs, not 16"),
        (int4_layer(20, 64, 32), torch.bfloat16, "int4pack supports multiples of 8 x 32, not 20 x 64"),
        (int4_layer(32, 64, 32), torch.float32, "int4pack supports bfloat16, float16, not float32"),
    ],
)
def test_layers_without_a_kernel_on_the_card_are_reported(grouped: Grouped, dtype: torch.dtype, said: str) -> None:
    assert Int4Format(ON_CARD).lacking(whole(grouped), dtype) == said


@pytest.mark.parametrize(
    ("change", "lacking"),
    [
        ({"zeros": torch.ones(24, 1, dtype=torch.int8)}, "one scale per output and no zeros"),
        ({"groups": EvenGroups(32), "scales": torch.ones(24, 3)}, "one scale per output and no zeros"),
        ({"codes": torch.ones(24, 84, dtype=torch.int8)}, "multiples of 8 x 8, not 24 x 84"),
    ],
)
def test_int8_with_more_than_one_scale_is_left(change: dict[str, object], lacking: str) -> None:
    weight = whole(replace(int8_layer(24, 96), **change), rounded_inputs=torch.int8)  # type: ignore[arg-type]

    assert lacking in str(RoundedFormat(INT8_BY_TORCH).lacking(weight, torch.bfloat16))


def test_int8_weights_alone_are_not_multiplied_with_rounded_inputs() -> None:
    assert RoundedFormat(INT8_BY_TORCH).handles(whole(int8_layer(8, 8), rounded_inputs=torch.int8))
    assert not RoundedFormat(INT8_BY_TORCH).handles(whole(int8_layer(8, 8)))


_SPOILT = {
    "neighbours swapped": lambda weight: replace(weight, codes=weight.codes.unflatten(1, (-1, 2)).flip(2).flatten(1)),
    "a zero more": lambda weight: replace(weight, zeros=weight.zeros + 1),
    "another group's scale": lambda weight: replace(weight, scales=weight.scales.roll(1, 1)),
    "another output's scale": lambda weight: replace(weight, scales=weight.scales.roll(1, 0)),
    "another group's zero": lambda weight: replace(weight, zeros=weight.zeros.roll(1, 1)),
    "outputs moved": lambda weight: replace(weight, codes=weight.codes.roll(1, 0)),
    "one column lost": lambda weight: replace(weight, codes=weight.codes.index_fill(1, torch.tensor([9]), 0)),
    "one output lost": lambda weight: replace(weight, codes=weight.codes.index_fill(0, torch.tensor([9]), 0)),
}


@pytest.mark.parametrize("inputs", [128, 1024])
@pytest.mark.parametrize("spoil", _SPOILT.values(), ids=_SPOILT)
def test_a_kernel_that_computes_something_else_is_not_kept(spoil: object, inputs: int) -> None:
    assert callable(spoil)
    grouped, form = int4_layer(48, inputs, 64), Int4Format(ON_HOST)
    weight = whole(grouped)

    said = [_compared(grouped, weight, form, packed) for packed in (weight, spoil(weight))]

    assert said[0] is None
    assert "rounding explains only" in str(said[1])


def test_a_kernel_without_its_inputs_order_is_not_kept() -> None:
    even = int4_layer(32, 128, 32)
    grouped = replace(even, groups=torch.arange(128) % 4)
    weight, form = whole(grouped), Int4Format(ON_HOST)

    assert _compared(grouped, weight, form, weight) is None
    assert "rounding explains only" in str(_compared(grouped, weight, form, replace(weight, order=None)))


def test_an_int8_kernel_with_another_scale_is_not_kept() -> None:
    grouped, form = int8_layer(24, 256), RoundedFormat(INT8_BY_TORCH)
    weight = whole(grouped, rounded_inputs=torch.int8)

    assert _compared(grouped, weight, form, weight) is None
    assert _compared(grouped, weight, form, replace(weight, scales=weight.scales * 1.1)) is not None


def test_a_kernel_that_gives_no_number_is_not_kept() -> None:
    grouped, form = int4_layer(16, 64, 32), Int4Format(ON_HOST)
    weight = whole(grouped)
    scales = weight.scales.clone()
    scales[5, 1] = torch.nan

    assert "output 5" in str(_compared(grouped, weight, form, replace(weight, scales=scales)))


def _compared(grouped: Grouped, weight: KeptWeight, form: KeptFormat, packed: KeptWeight) -> str | None:
    outputs, inputs = grouped.codes.shape
    kept = KeptLinear(nn.Linear(inputs, outputs, bias=False), form.pack(packed, torch.bfloat16), packed.order)
    return disagreement(kept, grouped, weight, form, torch.bfloat16)


@pytest.mark.parametrize(("outputs", "inputs", "size"), [(64, 96, 32), (32, 256, 64), (40, 192, 64), (8, 512, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_cards_kernel_is_called_by_its_rules(outputs: int, inputs: int, size: int, dtype: torch.dtype) -> None:
    """The stand-in has the layout and the refusals of torch's kernel for CUDA, which never ran here."""
    card = CardInt4()
    form = Int4Format(replace(ON_CARD, pack=card.pack, multiply=card.multiply))
    grouped = int4_layer(outputs, inputs, size)
    weight = whole(grouped)
    assert form.lacking(weight, dtype) is None

    kernel = form.pack(weight, dtype)
    kept = KeptLinear(nn.Linear(inputs, outputs, bias=False), kernel, None)

    assert disagreement(kept, grouped, weight, form, dtype) is None
    assert kept(rows_of(3, inputs, dtype)).dtype == dtype
    assert kernel.num_bytes == outputs * inputs // 2 + outputs * (inputs // size) * 4


@pytest.mark.parametrize("inputs", [32, 64, 96, 128, 256])
def test_codes_are_restored_from_the_cards_order(inputs: int) -> None:
    """For every number of inner tiles: 2, 4 and 8."""
    codes = torch.randint(0, 16, (24, inputs), dtype=torch.uint8, generator=torch.Generator().manual_seed(inputs))
    inner = next(tiles for tiles in (8, 4, 2) if inputs % (tiles * 16) == 0)
    assert ON_CARD.unpack is not None

    packed = CardInt4().pack(ON_CARD.arrange(codes), inner)

    assert torch.equal(ON_CARD.unpack(packed), codes.to(torch.int32))
    assert torch.equal(ON_CARD.unpack(packed[1:]), codes[8:].to(torch.int32))


def test_many_rows_are_multiplied_by_the_widened_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    card, grouped = CardInt4(), int4_layer(40, 128, 32)
    monkeypatch.setattr(kept_int4pack, "_STRIP", 16)
    form = Int4Format(replace(ON_CARD, pack=card.pack, multiply=card.multiply))
    kernel, rows = form.pack(whole(grouped), torch.bfloat16), rows_of(MANY_ROWS, 128, torch.bfloat16)

    few, calls = kernel(rows[:3]), card.num_products
    many = kernel(rows)

    assert card.num_products == calls == 1
    assert torch.equal(many[:3], few)


def test_a_wrong_order_shows_where_rows_are_many() -> None:
    card, grouped = CardInt4(), int4_layer(32, 128, 32)
    wrong = replace(ON_CARD, pack=card.pack, multiply=card.multiply, unpack=lambda p: ON_CARD.unpack(p).roll(1, 1))  # type: ignore[misc]
    weight, form = whole(grouped), Int4Format(wrong)

    assert "rounding explains only" in str(_compared(grouped, weight, form, weight))


def test_the_cards_shapes_are_those_of_torchs_own_shape_functions() -> None:
    weight = whole(int4_layer(40, 192, 64))
    with FakeTensorMode():
        codes, scales = torch.empty(40, 192, dtype=torch.uint8), torch.empty(40, 3)
        of_shapes = replace(weight, codes=codes, scales=scales, zeros=None)

        kernel = Int4Format(ON_CARD).pack(of_shapes, torch.bfloat16)
        product = kernel(torch.empty(3, 192, dtype=torch.float16))

    assert isinstance(kernel, Int4Kernel)
    assert kernel.packed.shape == (40 // 8, 192 // 64, 32, 2)
    assert (product.shape, product.dtype) == ((3, 40), torch.float16)
    assert CardInt4().pack(ON_CARD.arrange(weight.codes), 4).shape == kernel.packed.shape


def test_a_device_names_formats_of_the_table() -> None:
    assert formats_named(("int8", "experts-widened", "int4pack")) == (FORMATS["int8"], FORMATS["int4pack"])
    assert experts_named(("int8", "experts-widened", "int4pack")) == (EXPERTS["experts-widened"],)
    assert formats_named(TRAITS.kept_linears) == ()
    with pytest.raises(KeyError):
        formats_named(("int3",))
