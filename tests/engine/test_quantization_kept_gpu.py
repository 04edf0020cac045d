"""Quantised layers on a GPU, by torch's own kernels there. Every machine without one skips all of it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from devices.table import find_kind
from engine.loader import load_model
from engine.quantization.compact import compact_experts
from engine.quantization.interface import EvenGroups, Grouped
from engine.quantization.kept import KeptFormat, KeptLinear, KeptWeight, kept_weight
from engine.quantization.kept_check import disagreement
from engine.quantization.kept_experts import KeptExperts
from engine.quantization.kept_experts_load import choose_format
from engine.quantization.kept_table import EXPERTS, FORMATS
from tests.engine.step_runner import generate
from tests.engine.test_quantization_kept import float8_layer
from tests.engine.test_quantization_kept_experts import block_layer
from tests.engine.tiny_models import make_tiny_model
from tests.engine.tiny_quantised import Scheme, awq, gptq, quantise_checkpoint, w8a8

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device: all of what only a GPU can show", allow_module_level=True)

_GPU = torch.device("cuda", 0)
_KEPT = find_kind("cuda").open().traits.kept_linears
_PROMPTS = [[5, 9, 200, 31, 7], list(range(40, 75))]


def int4_layer(outputs: int, inputs: int, size: int) -> Grouped:
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=_GPU)
    zeros = torch.randint(0, 16, (outputs, inputs // size), dtype=torch.uint8, device=_GPU)
    return Grouped(codes, torch.rand(zeros.shape, device=_GPU).half() * 0.05 + 0.01, zeros, EvenGroups(size))


def compared(grouped: Grouped, form: KeptFormat, dtype: torch.dtype, spoil: bool) -> str | None:
    weight = kept_weight(grouped, rounded_inputs=grouped.codes.dtype)
    assert isinstance(weight, KeptWeight)
    assert form.lacking(weight, dtype) is None
    packed = replace(weight, codes=weight.codes.roll(1, 1)) if spoil else weight
    outputs, inputs = weight.shape
    kept = KeptLinear(nn.Linear(inputs, outputs, bias=False), form.pack(packed, dtype), weight.order)
    return disagreement(kept, grouped, weight, form, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [32, 64, 128, 256])
@pytest.mark.parametrize(("outputs", "inputs"), [(8, 512), (1024, 256), (4096, 4096), (1000, 11_008)])
def test_4_bits_multiply_as_dequantised_ones(outputs: int, inputs: int, size: int, dtype: torch.dtype) -> None:
    grouped, form = int4_layer(outputs, inputs, size), FORMATS["int4pack"]

    assert compared(grouped, form, dtype, False) is None
    assert compared(grouped, form, dtype, True) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(8, 8), (1024, 512), (4096, 11_008)])
def test_int8_multiplies_as_its_weights_and_rounded_inputs(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=_GPU)
    grouped = Grouped(codes, torch.rand(outputs, 1, device=_GPU) * 0.01 + 1e-3, None, EvenGroups(inputs))

    assert compared(grouped, FORMATS["int8"], dtype, False) is None
    assert compared(grouped, FORMATS["int8"], dtype, True) is not None


@pytest.mark.skipif("float8" not in _KEPT, reason="this GPU has no float8")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 16), (1024, 512), (4096, 11_008)])
def test_float8_multiplies_as_its_weights_and_rounded_inputs(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    codes = (torch.randn(outputs, inputs, device=_GPU) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    grouped = Grouped(codes, torch.rand(outputs, 1, device=_GPU) * 0.01 + 1e-3, None, EvenGroups(inputs))

    assert compared(grouped, FORMATS["float8"], dtype, False) is None


@pytest.mark.parametrize("name", [name for name in ("float8-blocks", "widened") if name in _KEPT])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 128), (1024, 512), (4096, 7168)])
def test_float8_by_block_multiplies_as_its_weights(outputs: int, inputs: int, dtype: torch.dtype, name: str) -> None:
    grouped = block_layer(outputs, inputs, 128, 128)
    moved = Grouped(grouped.codes.to(_GPU), grouped.scales.to(_GPU), None, grouped.groups)

    assert compared(moved, FORMATS[name], dtype, False) is None


@pytest.mark.parametrize("name", [name for name in ("experts-float8", "experts-widened") if name in _KEPT])
def test_experts_multiply_as_their_weights(name: str) -> None:
    rounded = torch.float8_e4m3fn
    layers = [float8_layer(1024, 512) for _ in range(16)]
    weights = [kept_weight(one, rounded_inputs=rounded) for one in layers]
    held = compact_experts(weights, 16, _GPU)
    assert not isinstance(held, str)
    checked = {number: one for number, one in enumerate(weights) if isinstance(one, KeptWeight)}

    made = choose_format(held, checked, [EXPERTS[name]], rounded, torch.bfloat16)

    assert isinstance(made, KeptExperts), made


@pytest.mark.parametrize("scheme", [awq(32), gptq(4, 32, act_order=True), w8a8("channel")], ids=lambda s: s.name)
def test_a_model_is_served_by_its_kept_weights(scheme: Scheme, tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path / "llama")
    quantise_checkpoint(scheme, path)
    device = find_kind("cuda").open()

    loaded = load_model(
        path, dtype="bfloat16", block_size=16, kv_cache_memory=1 << 20, num_threads=1, device=device
    )  # fmt: skip

    assert any(", kept: 14 of 14 quantised layers; " in note for note in loaded.notes)
    assert [len(tokens) for tokens in generate(loaded.model, _PROMPTS, 12, chunk=16)] == [12, 12]
