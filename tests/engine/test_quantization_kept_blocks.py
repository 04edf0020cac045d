"""float8 layers with scales by block that stay quantised: torch's product by the rules of its source, and widening."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.functional import ScalingType

from engine.oracle import load_plain
from engine.quantization import compact, kept_table
from engine.quantization.arithmetic import dequantise
from engine.quantization.interface import EvenGroups, Grouped
from engine.quantization.kept import KeptFormat, KeptLinear, KeptWeight
from engine.quantization.kept_blocks import BlockFormat, BlockKernel, WidenedFormat
from engine.quantization.kept_check import disagreement
from tests.engine.card_float8 import CardFloat8
from tests.engine.rank_logits import load_rank, rank_logits
from tests.engine.test_quantization_kept import float8_layer, rows_of, whole
from tests.engine.test_quantization_kept_experts import block_layer
from tests.engine.tiny_families import make_family
from tests.engine.tiny_quantised import Scheme, fp8, hf_fp8, quantise_checkpoint
from wire.kv_layout import Rank

_FLOAT8 = torch.float8_e4m3fn


def _kept(weight: KeptWeight, form: KeptFormat, dtype: torch.dtype) -> KeptLinear:
    outputs, inputs = weight.shape
    return KeptLinear(nn.Linear(inputs, outputs, bias=False), form.pack(weight, dtype), weight.order)


@pytest.mark.combinations(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [1, 16, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 256), (256, 128), (384, 640), (128, 1024)])
def test_block_products_are_those_of_rounded_inputs(outputs: int, inputs: int, count: int, dtype: torch.dtype) -> None:
    card = CardFloat8()
    grouped, rows, form = (
        block_layer(outputs, inputs, 128, 128),
        rows_of(count, inputs, dtype),
        BlockFormat(card.scaled_mm),
    )
    weight = whole(grouped, rounded_inputs=_FLOAT8)
    parts = rows.float().view(count, -1, 128)
    steps = parts.abs().amax(2, keepdim=True) / 448
    rounded = ((parts / steps).to(_FLOAT8).float() * steps).view(count, inputs).double()
    assert form.handles(replace(weight, scales=torch.ones(outputs, 2)))
    assert form.lacking(weight, dtype) is None

    kernel = form.pack(weight, dtype)
    got = kernel(rows)

    expected = rounded @ dequantise(grouped, torch.float32).double().t()
    assert (got.shape, got.dtype, card.num_products) == ((count, outputs), dtype, 1)
    torch.testing.assert_close(got.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    assert kernel.num_bytes == outputs * inputs + 4 * (outputs // 128) * -(-inputs // 512) * 4
    assert disagreement(_kept(weight, form, dtype), grouped, weight, form, dtype) is None
    spoilt = replace(weight, scales=weight.scales * 1.3)
    assert disagreement(_kept(spoilt, form, dtype), grouped, weight, form, dtype) is not None


@pytest.mark.parametrize(
    ("outputs", "inputs", "rows", "columns"),
    [(192, 256, 128, 128), (256, 192, 128, 128), (256, 256, 64, 128), (256, 256, 128, 64)],
)
def test_weights_in_other_blocks_are_widened(outputs: int, inputs: int, rows: int, columns: int) -> None:
    weight = whole(block_layer(outputs, inputs, rows, columns), rounded_inputs=_FLOAT8)

    assert "scaled_mm supports whole blocks of 128 x 128" in str(
        BlockFormat(functional.scaled_mm).lacking(weight, torch.bfloat16)
    )
    assert WidenedFormat().handles(weight)


def test_block_scales_fit_torchs_shape_function() -> None:
    for outputs, inputs in ((128, 128), (384, 640)):
        weight = whole(block_layer(outputs, inputs, 128, 128), rounded_inputs=_FLOAT8)
        kernel = BlockFormat(functional.scaled_mm).pack(weight, torch.bfloat16)
        assert isinstance(kernel, BlockKernel)
        with FakeTensorMode() as mode:
            moved = BlockKernel(
                torch.empty(outputs, inputs, dtype=_FLOAT8, device="cuda"),
                torch.empty_strided(kernel.scales.shape, kernel.scales.stride(), device="cuda"), functional.scaled_mm,
            )  # fmt: skip
            made = moved(torch.empty(3, inputs, dtype=torch.bfloat16, device="cuda"))
            wrong = replace(moved, scales=torch.empty(kernel.scales.shape, device="cuda"))
            if outputs > 128:
                with pytest.raises(RuntimeError, match="blockwise scaling"):
                    wrong(torch.empty(3, inputs, dtype=torch.bfloat16, device="cuda"))
        assert mode is not None
        assert (made.shape, made.dtype) == ((3, outputs), torch.bfloat16)


def _codes(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(_FLOAT8)


@pytest.mark.parametrize(
    ("said", "changed"),
    [
        ("fp8 types", {"mat_a": torch.ones(16, 256)}),
        ("row_major", {"mat_a": _codes(256, 16).t()}),
        ("col_major", {"mat_b": _codes(256, 128)}),
        ("divisible by 16", {"mat_b": _codes(120, 256).t()}),
        ("recipe", {"scale_recipe_a": ScalingType.RowWise}),
        ("recipe", {"scale_recipe_b": ScalingType.BlockWise1x128}),
        ("Float", {"scale_a": torch.ones(2, 16).t().half()}),
        ("scale_a must have shape", {"scale_a": torch.ones(1, 16).t()}),
        ("scale_a must have strides", {"scale_a": torch.ones(16, 2)}),
        ("scale_b must have shape", {"scale_b": torch.ones(1, 2).t()}),
        ("scale_b must have strides", {"scale_b": torch.ones(2, 8).t()[:4, :1]}),
        ("output dtype", {"output_dtype": torch.float16}),
    ],
)
def test_a_block_product_outside_the_rules_is_refused(said: str, changed: dict[str, Any]) -> None:
    right: dict[str, Any] = {
        "mat_a": _codes(16, 256), "mat_b": _codes(128, 256).t(), "scale_a": torch.ones(2, 16).t(),
        "scale_recipe_a": ScalingType.BlockWise1x128, "scale_b": torch.ones(1, 4).t(),
        "scale_recipe_b": ScalingType.BlockWise128x128, "output_dtype": torch.bfloat16,
    }  # fmt: skip
    assert torch.equal(CardFloat8().scaled_mm(**right), torch.full((16, 128), 256, dtype=torch.bfloat16))

    with pytest.raises(ValueError, match=said):
        CardFloat8().scaled_mm(**right | changed)


@pytest.mark.parametrize(
    ("said", "changed"),
    [
        ("E4M3", {"mat_a": torch.ones(7, 32)}),
        ("mat1 to not be transposed", {"mat_a": _codes(32, 7).t()}),
        ("mat2 to be transposed", {"mat_b": _codes(2, 32, 16)}),
        ("divisible by 16", {"mat_b": _codes(2, 24, 32).transpose(1, 2), "scale_b": torch.ones(2, 24)}),
        ("float32", {"scale_b": torch.ones(2, 16).bfloat16()}),
        ("scale_a", {"scale_a": torch.ones(7, 1)}),
        ("scale_b", {"scale_b": torch.ones(16)}),
        ("int32", {"offs": torch.tensor([3, 7])}),
        ("bfloat16", {"out_dtype": torch.float32}),
    ],
)
def test_a_grouped_product_outside_the_rules_is_refused(said: str, changed: dict[str, Any]) -> None:
    right: dict[str, Any] = {
        "mat_a": _codes(7, 32), "mat_b": _codes(2, 16, 32).transpose(1, 2), "scale_a": torch.ones(7),
        "scale_b": torch.ones(2, 16), "offs": torch.tensor([3, 7], dtype=torch.int32), "out_dtype": torch.bfloat16,
    }  # fmt: skip
    assert torch.equal(CardFloat8().scaled_grouped_mm(**right), torch.full((7, 16), 32, dtype=torch.bfloat16))

    with pytest.raises(ValueError, match=said):
        CardFloat8().scaled_grouped_mm(**right | changed)


@pytest.mark.parametrize("rows_at_once", [8, 24, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_widened_products_are_those_of_the_dequantised_weight(
    dtype: torch.dtype, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped, rows, form = block_layer(56, 96, 8, 32), rows_of(5, 96, dtype), WidenedFormat()
    monkeypatch.setattr(compact, "SCRATCH_BYTES", rows_at_once * 96 * dtype.itemsize)
    weight = whole(grouped)

    got = _kept(weight, form, dtype)(rows)

    expected = functional.linear(rows, dequantise(grouped, dtype))
    torch.testing.assert_close(got, expected)
    assert disagreement(_kept(weight, form, dtype), grouped, weight, form, dtype) is None


def test_only_float8_with_several_scales_per_output_is_widened() -> None:
    assert not WidenedFormat().handles(whole(float8_layer(24, 96)))
    assert not WidenedFormat().handles(
        whole(Grouped(torch.ones(8, 64, dtype=torch.int8), torch.ones(8, 2), None, EvenGroups(32)))
    )


@pytest.mark.combinations(1)
@pytest.mark.parametrize("scheme", [hf_fp8((128, 128)), fp8((128, 128))], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_multiply_their_blocks(
    scheme: Scheme, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs are rounded by 128 neighbours, which lie on one rank: the ranks' logits are those of one rank.

    A rank of two has only 128 inputs of the output projection, which is one scale per output.
    """
    formats = ("float8", "float8-blocks")
    card = CardFloat8()
    monkeypatch.setitem(kept_table.FORMATS, "float8-blocks", BlockFormat(card.scaled_mm))
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    path = make_family("llama", tmp_path, **sizes, intermediate_size=512, num_hidden_layers=1)
    plain = load_plain(path, "float32")
    plain.load_state_dict(quantise_checkpoint(scheme, path))
    for name, layer in plain.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            layer.register_forward_pre_hook(_round_by_block)
    token_ids = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        expected = plain(input_ids=token_ids, use_cache=False).logits

    own, *_ = rank_logits(path, num_ranks, token_ids, formats=formats)

    assert (own - expected).norm() < 0.02 * expected.norm()
    assert card.num_products > 0
    elements = 4 * 256 * 256 + 3 * 256 * 512
    for number in range(num_ranks):
        network = load_rank(path, Rank(number, num_ranks), lambda _: None, formats=formats)
        kept = [layer for layer in network.modules() if isinstance(layer, KeptLinear)]
        held = sum(layer.num_bytes for layer in kept)
        assert (len(kept), elements / num_ranks < held < elements / num_ranks * 1.01) == (7, True)


def _round_by_block(_layer: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    parts = inputs[0].reshape(*inputs[0].shape[:-1], -1, 128)
    steps = parts.abs().amax(-1, keepdim=True) / 448
    return (((parts / steps).to(_FLOAT8).float() * steps).flatten(-2),)


@pytest.mark.combinations(1)
@pytest.mark.parametrize("block", [(32, 32), (24, 40), (64, 48)])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_that_widen_their_blocks_are_the_dequantised_model(
    block: tuple[int, int], num_ranks: int, tmp_path: Path
) -> None:
    """Where a cut is within a block its ranks repeat the scale."""
    path = make_family("llama", tmp_path, num_hidden_layers=2, num_key_value_heads=4)
    plain = load_plain(path, "float32")
    plain.load_state_dict(quantise_checkpoint(hf_fp8(block), path))
    token_ids = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        expected = plain(input_ids=token_ids, use_cache=False).logits

    own, *_ = rank_logits(path, num_ranks, token_ids, formats=("widened",))

    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
    network = load_rank(path, Rank(0, num_ranks), lambda _: None, formats=("widened",))
    assert any(isinstance(layer, KeptLinear) for layer in network.modules())
