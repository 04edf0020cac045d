"""Static W8A8 layers that stay quantised: equal to plain whole numbers, by ranks and in whole models."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.checkpoints.materialise import DimensionRanges
from engine.checkpoints.stored_weights import StoredWeights
from engine.loader import LoadedModel, load_model
from engine.oracle import Oracle
from engine.quantization.detect import find_quantization
from engine.quantization.interface import Grouped
from engine.quantization.kept import KeptLinear, KeptWeight, kept_weight
from engine.quantization.kept_check import disagreement
from engine.quantization.kept_cut import read_cut
from engine.quantization.kept_rounded import int8_sums
from engine.quantization.kept_static import STATIC_BY_TORCH, StaticFormat
from engine.quantization.kept_table import FORMATS
from engine.quantization.weights import DequantisingWeights
from tests.devices.fake_device import TRAITS, FakeDevice
from tests.engine.plain_static import PlainStatic, compute_statically, rows_of, static_layer
from tests.engine.rank_logits import rank_logits
from tests.engine.step_runner import generate
from tests.engine.tiny_families import make_family
from tests.engine.tiny_models import make_tiny_model
from tests.engine.tiny_quantised import modelslim, quantise_checkpoint, shift_norms

_PROMPTS = [[5, 9, 200, 31, 7], [17] * 3 + [4, 250, 96, 12, 300, 44], list(range(40, 75))]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FORMAT = StaticFormat(STATIC_BY_TORCH)
_DOWN = "model.layers.0.mlp.down_proj"  # [64, 96]
_KEEPS: Any = {"device": FakeDevice(traits=replace(TRAITS, kept_linears=("int8-static",))), "block_size": 32}


def whole(grouped: Grouped) -> KeptWeight:
    weight = kept_weight(grouped, rounded_inputs=torch.int8)
    assert isinstance(weight, KeptWeight)
    return weight


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 96), (7, 45), (8, 4096)])
@pytest.mark.parametrize("count", [1, 40])
def test_sums_equal_plain_whole_numbers_bit_for_bit(
    count: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:  # fmt: skip
    grouped, plain = static_layer(outputs, inputs)
    rows = rows_of(count, inputs, dtype)
    kernel: Any = _FORMAT.pack(whole(grouped), dtype)

    rounded = kernel.op.round(rows, kernel.per_step, kernel.zero)
    sums = int8_sums(rounded, kernel.codes) + kernel.bias

    assert (sums.dtype, rounded.dtype) == (torch.int32, torch.int8)
    assert np.array_equal(rounded.numpy(), plain.rounded(rows))
    assert np.array_equal(sums.numpy(), plain.sums(rows))
    assert count == 1 or set(np.unique(rounded)) >= {-128, 127}
    got, exact = kernel(rows), plain.outputs(rows)
    assert got.dtype == dtype
    assert np.allclose(got.double().numpy(), exact, rtol=float(torch.finfo(dtype).eps), atol=0)


def test_the_largest_sums_are_exact() -> None:
    codes = torch.full((8, 11_008), -128, dtype=torch.int8)

    sums = int8_sums(torch.cat([codes[:2], -1 - codes[:2]]), codes)

    assert sums[:, 0].tolist() == [128 * 128 * 11_008] * 2 + [-127 * 128 * 11_008] * 2


_SPOILT = {
    "neighbours swapped": lambda weight, static: replace(
        weight, codes=weight.codes.unflatten(1, (-1, 2)).flip(2).flatten(1)
    ),
    "outputs moved": lambda weight, static: replace(weight, codes=weight.codes.roll(1, 0)),
    "no bias": lambda weight, static: replace(weight, static=replace(static, bias=None)),
    "another output's bias": lambda weight, static: replace(weight, static=replace(static, bias=static.bias.roll(1))),
    "another output's scale": lambda weight, static: replace(
        weight, static=replace(static, scales=static.scales.roll(1))
    ),
    "no zero": lambda weight, static: replace(weight, static=replace(static, zero=0)),
    "half a step": lambda weight, static: replace(weight, static=replace(static, step=static.step / 2)),
}


@pytest.mark.combinations(1)
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("spoil", _SPOILT.values(), ids=_SPOILT)
@pytest.mark.parametrize(("step", "zero"), [(0.037, -9), (1e-3, 40), (2.0, -128)])
def test_a_kernel_that_computes_something_else_is_not_kept(
    step: float, zero: int, spoil: Any, dtype: torch.dtype
) -> None:  # fmt: skip
    grouped, _ = static_layer(48, 512, step=step, zero=zero)
    weight = whole(grouped)
    linear = nn.Linear(512, 48, bias=False)

    said = [
        disagreement(KeptLinear(linear, _FORMAT.pack(packed, dtype), None), grouped, weight, _FORMAT, dtype)
        for packed in (weight, spoil(weight, weight.static))
    ]

    assert said[0] is None
    assert "rounding explains only" in str(said[1])


def test_only_static_formats_take_static_inputs() -> None:
    static, _ = static_layer(24, 96)

    for grouped, names in (
        (static, {"int8-static", "npu-int8-static"}),
        (replace(static, static=None), {"int8", "npu-int8", "npu-antiquant"}),
    ):
        assert {name for name, form in FORMATS.items() if form.handles(whole(grouped))} == names


def test_what_a_static_layer_lacks_is_reported() -> None:
    small, odd = whole(static_layer(24, 96, step=1e-5)[0]), static_layer(20, 96)[0]
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_gpu = whole(replace(odd, codes=torch.empty(20, 96, dtype=torch.int8, device="cuda")))

        assert _FORMAT.lacking(on_gpu, torch.bfloat16) == "int8 multiplication supports multiples of 8 x 8, not 20 x 96"
    assert _FORMAT.lacking(small, torch.float16) == "an input_scale of 1e-05 is too small for float16"
    assert _FORMAT.lacking(small, torch.bfloat16) is None


@pytest.mark.parametrize("is_float16", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_cuts_by_inputs_add_up_to_the_layer(num_ranks: int, is_float16: bool, tmp_path: Path) -> None:
    """In whole numbers: the bias is in the sums of one rank. Cuts by outputs have the rows of the layer."""
    module, plain = _stored_layer(tmp_path, is_float16)
    rows = rows_of(5, 96, torch.float32)
    sums, outputs = np.zeros((5, 64), np.int64), []

    for number in range(num_ranks):
        columns, some = (range(length * number // num_ranks, length * (number + 1) // num_ranks) for length in (96, 64))
        cut = read_cut(module, DimensionRanges(1, ((columns.start, columns.stop),)))
        kernel: Any = _FORMAT.pack(whole(cut), torch.float32)
        rounded = kernel.op.round(rows[:, columns.start : columns.stop], kernel.per_step, kernel.zero)
        assert (kernel.bias is None) == (number > 0)
        sums += (int8_sums(rounded, kernel.codes) + (0 if kernel.bias is None else kernel.bias)).numpy()
        halves = ((some.start, some.start + 3), (some.start + 3, some.stop))
        outputs.append(_FORMAT.pack(whole(read_cut(module, DimensionRanges(0, halves))), torch.float32)(rows))

    assert np.array_equal(sums, plain.sums(rows))
    assert np.array_equal(torch.cat(outputs, 1).numpy(), plain.outputs(rows).astype(np.float32))


def _stored_layer(path: Path, is_float16: bool) -> tuple[Any, PlainStatic]:
    folder = make_tiny_model("llama", path / "llama")
    quantise_checkpoint(modelslim("W8A8", is_float16=is_float16), folder)
    layout = find_quantization(folder, None)
    assert layout is not None
    weights = DequantisingWeights(StoredWeights(folder), layout, torch.float32)
    return weights.module(f"{_DOWN}.weight"), PlainStatic.of(load_file(folder / "model.safetensors"), _DOWN)


def _load(path: Path, **changes: Any) -> LoadedModel:
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 16, "kv_cache_memory": 1 << 20, "num_threads": 1}
    return load_model(path, **{**settings, **changes})


def _note(loaded: LoadedModel) -> str:
    (note,) = (note for note in loaded.notes if "kept" in note or "dequantised" in note)
    return note


@pytest.mark.parametrize(
    ("kind", "change", "is_float16"),
    [("llama", "", True), ("qwen2", "biases of the model", False), ("llama", "added biases", False)],
)
def test_a_model_has_the_tokens_of_whole_numbers(kind: str, change: str, is_float16: bool, tmp_path: Path) -> None:
    path = make_tiny_model(kind, tmp_path / "quantised")
    weights = quantise_checkpoint(modelslim("W8A8", is_float16=is_float16), path)
    if change == "added biases":
        shift_norms(path, weights)
    oracle = Oracle(path, "float32")
    compute_statically(oracle._network, path)

    loaded = _load(path, **_KEEPS)

    assert generate(loaded.model, _PROMPTS, 20, chunk=16) == oracle.generate_greedy(_PROMPTS, 20, ignore_eos=True)
    assert _note(loaded).startswith("ModelSlim W8A8, kept: 14 of 14 quantised layers; ")
    assert _note(loaded).endswith("; inputs are rounded to int8 by a stored step")


def test_a_bias_that_only_quant_bias_has_is_served(tmp_path: Path) -> None:
    """As vLLM Ascend does; a layer that is dequantised beside kept ones needs it stored (test_quantization.py)."""
    path = make_tiny_model("llama", tmp_path / "llama")
    weights = quantise_checkpoint(modelslim("W8A8"), path)
    shift_norms(path, weights)
    expected = generate(_load(path, **_KEEPS).model, _PROMPTS[:1], 12, chunk=16)
    _keep(path, lambda name: not name.endswith("_proj.bias"))

    assert generate(_load(path, **_KEEPS).model, _PROMPTS[:1], 12, chunk=16) == expected


def _keep(path: Path, wanted: Any) -> None:
    tensors = {name: tensor for name, tensor in load_file(path / "model.safetensors").items() if wanted(name)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_cpu_dequantises_static_layers_with_their_biases(num_ranks: int, tmp_path: Path) -> None:
    """Its decoder's native kernels take plain weights only, and decode faster (docs/quantization.md)."""
    path = make_family("llama", tmp_path, head_dim=32, intermediate_size=128)
    weights = quantise_checkpoint(modelslim("W8A8"), path)
    shift_norms(path, weights)
    token_ids = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(5))
    expected, *_ = rank_logits(path, 1, token_ids)
    _keep(path, lambda name: not name.endswith("_proj.bias"))
    without, *_ = rank_logits(path, 1, token_ids, formats=("int8-static",))

    own, *_ = rank_logits(path, num_ranks, token_ids)

    assert (own - expected).norm() < 0.02 * (without - expected).norm()
    assert _note(_load(path)).startswith("warning: ModelSlim W8A8 weights are dequantised to float32 at load, ")


def test_dynamic_layers_beside_static_ones_are_dequantised(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path / "llama")
    quantise_checkpoint(modelslim("W8A8_MIX"), path)
    description = path / "quant_model_description.json"
    described = json.loads(description.read_text())
    described |= {name: "W8A8" for name in described if ".0." in name and described[name] == "W8A8_MIX"}
    description.write_text(json.dumps(described))

    assert _note(_load(path, **_KEEPS)).endswith(
        "; 7 dequantised to float32: there is no kernel for 8-bit codes of W8A8 on this device; inputs are rounded to "
        "int8 by a stored step"
    )


def test_static_experts_are_dequantised_beside_kept_attention(tmp_path: Path) -> None:
    """vLLM Ascend has no static experts; theirs would need a step and a bias each."""
    path = make_family("mixtral", tmp_path / "mixtral")
    quantise_checkpoint(replace(modelslim("W8A8"), ignore=("lm_head", "gate")), path)
    device = FakeDevice(traits=replace(TRAITS, kept_linears=("int8-static", "experts-widened")))

    note = _note(_load(path, block_size=32, device=device))

    assert ", kept: 16 of 64 quantised layers; " in note
    assert "; 48 dequantised to float32: experts with static inputs have no kernel; inputs are rounded to int8" in note


@pytest.mark.often("2")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_have_the_logits_of_whole_numbers(num_ranks: int, tmp_path: Path) -> None:
    """In float32 the ranks' sums differ from one rank's only by roundings, and an input between two steps may move."""
    path = make_family("llama", tmp_path, head_dim=32, intermediate_size=128)
    weights = quantise_checkpoint(modelslim("W8A8"), path)
    shift_norms(path, weights)
    token_ids = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(5))
    oracle = Oracle(path, "float32")
    compute_statically(oracle._network, path)
    with torch.inference_mode():
        expected = oracle._network(input_ids=token_ids, use_cache=False).logits
    dequantised, *_ = rank_logits(path, num_ranks, token_ids)

    own, *_ = rank_logits(path, num_ranks, token_ids, formats=("int8-static",))

    assert (own - expected).norm() < 0.02 * (dequantised - expected).norm()
