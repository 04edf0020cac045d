"""Quantised tensors read as plain ones: each layout against plain arithmetic, by parts, and no more bytes than that."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoints.stored_weights import StoredWeights
from engine.checkpoints.weights import TensorSlice
from engine.quantization.arithmetic import dequantise
from engine.quantization.bits import covering, unpack
from engine.quantization.detect import find_quantization
from engine.quantization.interface import EvenGroups, Grouped
from engine.quantization.modelslim import ModelSlimLayout
from engine.quantization.weights import DequantisingWeights
from tests.engine.tiny_models import make_tiny_model
from tests.engine.tiny_quantised import (
    MODELSLIM_STEP,
    MODELSLIM_ZERO,
    SCHEMES,
    Scheme,
    awq,
    gptq,
    modelslim,
    packed,
    quantise_checkpoint,
    shift_norms,
    w8a8,
    words_of,
)
from wire.errors import ConfigError

_DOWN = "model.layers.0.mlp.down_proj.weight"  # [64, 96]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "tiny-llama")


def _open(path: Path, dtype: torch.dtype = torch.float32) -> DequantisingWeights:
    layout = find_quantization(path, None)
    assert layout is not None
    return DequantisingWeights(StoredWeights(path), layout, dtype)


def _change(path: Path, name: str, values: torch.Tensor | None) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors.pop(name, None)
    if values is not None:
        tensors[name] = values
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_fields_unpack_in_order_across_words(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 96))

    words = torch.tensor(words_of(codes, bits))

    assert torch.equal(unpack(words, bits), torch.from_numpy(codes).to(torch.uint8))


@pytest.mark.parametrize(
    ("fields", "bits", "words", "inside"),
    [
        (range(8), 4, range(1), range(8)),
        (range(9, 17), 4, range(1, 3), range(1, 9)),
        (range(33, 40), 3, range(3, 6), range(1, 8)),
        (range(5, 6), 8, range(1, 2), range(1, 2)),
    ],
)
def test_only_words_that_hold_the_fields_are_covered(fields: range, bits: int, words: range, inside: range) -> None:
    assert covering(fields, bits) == (words, inside)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_every_layout_dequantises_as_plain_arithmetic(scheme: Scheme, llama: Path) -> None:
    expected = quantise_checkpoint(scheme, llama)

    weights = _open(llama)

    assert list(weights.names) == sorted(expected)
    for name, values in expected.items():
        assert weights.shape(name) == tuple(values.shape), name
        assert weights.dtype(name) == torch.float32, name
        assert torch.equal(weights.read(name), values), name


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_a_part_equals_the_slice_of_the_whole(scheme: Scheme, llama: Path) -> None:
    whole = quantise_checkpoint(scheme, llama)[_DOWN]
    weights = _open(llama)

    for part in (
        TensorSlice(0, 0, 32),
        TensorSlice(0, 13, 47),
        TensorSlice(0, 63, 64),
        TensorSlice(1, 32, 96),
        TensorSlice(1, 5, 71),
        TensorSlice(1, 8, 8),
    ):
        values = weights.read(_DOWN, part)

        assert torch.equal(values, whole.narrow(part.dim, part.start, part.end - part.start)), part
        assert values.is_contiguous()


@pytest.mark.parametrize("is_float16", [False, True])
def test_a_static_modelslim_layer_computes_its_formula(is_float16: bool, llama: Path) -> None:
    """For inputs that the format represents, whole numbers only: (x_q . codes + quant_bias) * deq_scale."""
    quantise_checkpoint(modelslim("W8A8", is_float16=is_float16), llama)
    module = _DOWN.removesuffix("weight")
    parts = {
        name.removeprefix(module): tensor.numpy() for name, tensor in load_file(llama / "model.safetensors").items()
    }
    rounded = np.random.default_rng(0).integers(-128, 128, (5, 96))
    deq = parts["deq_scale"]
    deq = np.frombuffer(b"".join(value.tobytes()[:4] for value in deq), np.float32) if is_float16 else deq
    expected = (rounded @ parts["weight"].T.astype(np.int64) + parts["quant_bias"]) * deq.astype(np.float64)

    inputs = (rounded - MODELSLIM_ZERO) * np.float64(MODELSLIM_STEP)
    outputs = inputs @ _open(llama).read(_DOWN).T.double().numpy()

    assert np.allclose(outputs, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("part", [None, TensorSlice(0, 13, 47), TensorSlice(1, 5, 71)], ids=str)
def test_a_bias_only_in_modelslims_quant_bias_is_refused(part: TensorSlice | None, llama: Path) -> None:
    quantise_checkpoint(modelslim("W8A8"), llama)
    name = "model.layers.0.mlp.down_proj.quant_bias"
    _change(llama, name, load_file(llama / "model.safetensors")[name] + 40)

    with pytest.raises(ConfigError, match=r"down_proj has a bias in its quant_bias, but .*down_proj\.bias is missing"):
        _open(llama).read(_DOWN, part)


@pytest.mark.parametrize("is_float16", [False, True])
def test_a_bias_only_in_modelslims_quant_bias_is_derived(is_float16: bool, llama: Path) -> None:
    weights = quantise_checkpoint(modelslim("W8A8", is_float16=is_float16), llama)
    shift_norms(llama, weights)
    names = [name for name in load_file(llama / "model.safetensors") if name.endswith("_proj.bias")]
    stored = {name: load_file(llama / "model.safetensors")[name] for name in names}
    tensors = {name: one for name, one in load_file(llama / "model.safetensors").items() if name not in names}
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    layout = find_quantization(llama, None)
    assert isinstance(layout, ModelSlimLayout)

    derived = DequantisingWeights(StoredWeights(llama), replace(layout, derives_biases=True), torch.float32)

    assert len(stored) == 5
    for name, bias in stored.items():
        scale = tensors[f"{name.removesuffix('bias')}deq_scale"]
        scale = scale.int().view(torch.float32) if is_float16 else scale
        assert ((derived.read(name) - bias).abs() <= 0.51 * scale).all(), "it was rounded to a whole number of scales"
        assert torch.equal(derived.read(name, TensorSlice(0, 3, 9)), derived.read(name)[3:9])
    assert not derived.read("model.layers.1.mlp.down_proj.bias").any()
    assert torch.allclose(derived.read(_DOWN), weights[_DOWN], rtol=1e-6)
    assert derived.num_quantised == 14


def test_an_int8_weight_that_modelslim_calls_float_is_refused(llama: Path) -> None:
    quantise_checkpoint(modelslim("W8A8"), llama)
    _change(llama, "model.norm.weight", torch.ones(64, dtype=torch.int8))

    with pytest.raises(ConfigError, match=r"model\.norm\.weight is int8, but ModelSlim's description"):
        _open(llama)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"bias": torch.tensor([0.0] * 63 + [0.5])}, r"module\.bias differs from .*input_layernorm\.bias: export"),
        ({"weight": torch.full((64,), 2.0)}, r"module\.weight differs from .*input_layernorm\.weight: export"),
    ],
)
def test_a_smoothed_norm_must_equal_the_plain_one(
    change: dict[str, torch.Tensor], words: str | None, llama: Path
) -> None:
    quantise_checkpoint(modelslim("W8A8"), llama)
    norm = "model.layers.1.input_layernorm"
    plain = load_file(llama / "model.safetensors")[f"{norm}.weight"]
    for name, values in ({"weight": plain, "bias": torch.zeros(64)} | change).items():
        _change(llama, f"{norm}.module.{name}", values)
    file = llama / "quant_model_description.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), f"{norm}.module.weight": "W8A8"}))

    if words is None:
        assert torch.equal(_open(llama).read(f"{norm}.weight"), plain)
        return
    with pytest.raises(ConfigError, match=words):
        _open(llama)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_requested_dtype_rounds_once(dtype: torch.dtype, llama: Path) -> None:
    expected = quantise_checkpoint(awq(16), llama)

    weights = _open(llama, dtype)

    assert torch.equal(weights.read(_DOWN), expected[_DOWN].to(dtype))
    assert (weights.dtype(_DOWN), weights.dtype("model.norm.weight")) == (dtype, torch.float32)


@pytest.mark.parametrize("scheme", [gptq(4, 16), awq(16), w8a8("channel"), packed(4, 16)], ids=lambda s: s.name)
@pytest.mark.parametrize("dim", [0, 1])
def test_half_of_a_weight_reads_half_of_its_bytes(scheme: Scheme, dim: int, llama: Path) -> None:
    quantise_checkpoint(scheme, llama)
    module, sizes = _DOWN.removesuffix("weight"), []
    for part in (None, TensorSlice(dim, 0, 32 if dim == 0 else 48)):
        layout = find_quantization(llama, None)
        assert layout is not None
        with StoredWeights(llama) as stored:
            weights = DequantisingWeights(stored, layout, torch.float32)
            before = stored.bytes_read
            weights.read(_DOWN, part)
            sizes.append(stored.bytes_read - before)

    # a scale by output is of all its inputs; everything else is cut
    shared = 64 * 2 if scheme.name == "w8a8-channel" and dim == 1 else 0
    total = sum(t.nbytes for name, t in load_file(llama / "model.safetensors").items() if name.startswith(module))
    indivisible = 16 if scheme.name.startswith("packed") else 0  # weight_shape, read before
    g_idx = 96 * 4 if scheme.name.startswith("gptq") and dim == 0 else 0
    assert sizes[0] == total - indivisible
    assert sizes[1] - shared - g_idx == (sizes[0] - shared - g_idx) // 2


@pytest.mark.parametrize(
    "part", [TensorSlice(0, 0, 65), TensorSlice(1, 90, 97), TensorSlice(2, 0, 1), TensorSlice(0, 5, 4)]
)
def test_a_part_that_is_not_there_is_refused(part: TensorSlice, llama: Path) -> None:
    quantise_checkpoint(awq(16), llama)

    with pytest.raises(ValueError, match=r"down_proj.weight has shape \(64, 96\): .* is outside dimension"):
        _open(llama).read(_DOWN, part)


@pytest.mark.parametrize(
    ("groups", "num_columns", "runs"),
    [
        (EvenGroups(4), 12, [(0, 12, 0, 3)]),
        (EvenGroups(4), 10, [(0, 8, 0, 2), (8, 10, 2, 3)]),
        (EvenGroups(4, 1), 12, [(0, 3, 0, 1), (3, 11, 1, 3), (11, 12, 3, 4)]),
        (EvenGroups(4, 1), 2, [(0, 2, 0, 1)]),
        (EvenGroups(4), 3, [(0, 3, 0, 1)]),
        (EvenGroups(4, 3), 1, [(0, 1, 0, 1)]),
    ],
)
def test_even_groups_are_read_in_at_most_three_runs(
    groups: EvenGroups, num_columns: int, runs: list[tuple[int, ...]]
) -> None:
    walked = [(c.start, c.stop, g.start, g.stop) for c, g in groups.runs(num_columns)]

    assert walked == runs


def test_a_large_weight_is_dequantised_strip_by_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.arange(60, dtype=torch.uint8).reshape(10, 6)
    scales = torch.arange(1.0, 21.0).reshape(10, 2)
    grouped = Grouped(codes, scales, None, torch.tensor([0, 1, 0, 1, 1, 0]))
    expected = codes * scales[:, [0, 1, 0, 1, 1, 0]]

    monkeypatch.setattr("engine.quantization.arithmetic._STRIP_ELEMENTS", 18)

    assert torch.equal(dequantise(grouped, torch.float32), expected)


def test_the_extra_memory_is_counted(llama: Path) -> None:
    expected = quantise_checkpoint(awq(16), llama)
    stored = sum(tensor.nbytes for tensor in load_file(llama / "model.safetensors").values())

    weights = _open(llama)

    assert weights.stored_bytes == stored
    assert weights.held_bytes == sum(values.nbytes for values in expected.values())


def test_tensors_of_the_quantisation_are_hidden(llama: Path) -> None:
    quantise_checkpoint(w8a8("channel"), llama)
    _change(llama, "model.layers.0.self_attn.k_scale", torch.ones(1))
    _change(llama, "model.layers.0.self_attn.q_proj.input_scale", torch.ones(1))
    weights = _open(llama)

    assert not [name for name in weights.names if name.endswith("_scale")]
    with pytest.raises(KeyError, match="weight_scale"):
        weights.shape(_DOWN + "_scale")
    with pytest.raises(KeyError, match="weight_scale"):
        weights.read(_DOWN + "_scale")


@pytest.mark.parametrize(
    ("scheme", "tensor", "values", "words"),
    [
        (gptq(4, 32), "qzeros", None, "down_proj.qzeros is missing, though"),
        (gptq(4, 32), "scales", torch.ones(4, 64), r"down_proj: qweight \(12, 64\).* 4 bits and group size 32"),
        (gptq(4, 32), "qzeros", torch.zeros(3, 9, dtype=torch.int32), r"qzeros \(3, 9\)"),
        (gptq(4, 32), "qzeros", torch.zeros(3, 16, dtype=torch.int32), "do not fit GPTQ with 4 bits"),
        (awq(16), "scales", None, "down_proj.scales is missing, though"),
        (gptq(4, 32), "qweight", torch.zeros(768, dtype=torch.int32), r"qweight has shape \(768,\): only matrices"),
        (gptq(4, 32), "qweight", torch.zeros(12, 0, dtype=torch.int32), r"qweight has shape \(12, 0\)"),
        (
            gptq(4, 32),
            "qweight",
            torch.zeros(12, 64, dtype=torch.int64),
            r"qweight is torch\.int64",
        ),
        (gptq(4, 32), "g_idx", torch.zeros(95, dtype=torch.int32), r"g_idx has shape \(95,\) for 96 inputs"),
        (awq(16), "scales", torch.ones(6, 64, dtype=torch.int32), r"scales is torch\.int32"),
        (awq(16), "qweight", torch.zeros(64, 12, dtype=torch.int32), r"qweight \(64, 12\).*not AWQ's GEMM layout"),
        (w8a8("channel"), "weight", None, "down_proj.weight is missing"),
        (w8a8("channel"), "weight", torch.zeros(64, 96, dtype=torch.int16), r"down_proj.weight is torch\.int16"),
        (w8a8("channel"), "weight", torch.zeros(2, 64, 96, dtype=torch.int8), r"only matrices"),
        (w8a8("channel"), "weight_scale", torch.ones(63, 1), r"weight_scale has shape \(63, 1\).*\(64, 96\)"),
        (w8a8("group"), "weight_scale", torch.ones(64, 5), r"weight_scale has shape \(64, 5\)"),
        (w8a8("channel"), "weight_scale", torch.ones(64, 1, 1), r"weight_scale has shape \(64, 1, 1\)"),
        (w8a8("channel"), "weight_zero_point", torch.ones(63, 1, dtype=torch.int8), r"zero_point has shape \(63, 1\)"),
        (packed(4, 16), "weight_zero_point", torch.ones(7, 6, dtype=torch.int32), r"\(7, 6\), not \(8, 6\)"),
        (packed(4, 16), "weight_g_idx", torch.ones(95, dtype=torch.int32), "must have one group for each of 96"),
        (packed(4, 16), "weight_shape", None, "weight_packed without weight_shape"),
        (packed(4, 16), "weight_shape", torch.tensor([64, 64]), r"\(64, 12\) does not fit a weight \(64, 64\)"),
        (modelslim("W8A8"), "weight", None, "down_proj.weight is missing, though"),
        (modelslim("W8A8"), "weight", torch.zeros(64, 96), r"down_proj.weight is torch\.float32"),
        (modelslim("W8A8"), "deq_scale", None, "down_proj.deq_scale is missing, though"),
        (modelslim("W8A8"), "deq_scale", torch.ones(63), r"deq_scale is torch\.float32 \(63,\).*\(64, 96\)"),
        (modelslim("W8A8"), "deq_scale", torch.ones(64, dtype=torch.int32), r"deq_scale is torch\.int32"),
        (modelslim("W8A8"), "input_scale", torch.ones(96), r"input_scale has shape \(96,\), not one number"),
        (
            modelslim("W8A8"),
            "quant_bias",
            torch.ones(64),
            r"quant_bias is torch\.float32 \(64,\), not one number for each",
        ),
        (modelslim("W8A8"), "input_offset", None, "down_proj.input_offset is missing, though"),
        (modelslim("W8A8"), "input_scale", torch.zeros(1), r"input_scale is 0\.0; it must be a finite number above 0"),
        (modelslim("W8A8"), "input_offset", torch.tensor([128.0]), r"input_offset is 128\.0; it must be a whole"),
        (modelslim("W8A16"), "weight_scale", None, "down_proj.weight_scale is missing, though"),
        (modelslim("W8A16"), "weight_offset", torch.ones(63, 1), r"weight_offset has shape \(63, 1\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_their_shapes(
    scheme: Scheme, tensor: str, values: torch.Tensor | None, words: str, llama: Path
) -> None:
    quantise_checkpoint(scheme, llama)
    _change(llama, f"model.layers.0.mlp.down_proj.{tensor}", values)

    with pytest.raises(ConfigError, match=words):
        _open(llama)


@pytest.mark.parametrize("scheme", [packed(4, 40), packed(8, 64), w8a8("group")], ids=lambda s: s.name)
def test_groups_of_another_size_than_the_configs_are_refused(scheme: Scheme, llama: Path) -> None:
    """Three groups of 40 in 96 inputs are not three groups of 32: the scale's shape alone does not show it."""
    quantise_checkpoint(scheme, llama)
    if scheme.name.startswith("w8a8"):
        _change(llama, "model.layers.0.mlp.down_proj.weight_scale", torch.ones(64, 12))

    with pytest.raises(ConfigError, match=r"weight_scale divides 96 inputs into \d+ groups.*group_size \d+"):
        _open(llama)


@pytest.mark.parametrize(("scheme", "tensor"), [(gptq(4, 32), "g_idx"), (packed(4, 32), "weight_g_idx")])
def test_a_group_that_is_not_there_is_refused(scheme: Scheme, tensor: str, llama: Path) -> None:
    quantise_checkpoint(scheme, llama)
    _change(llama, f"model.layers.0.mlp.down_proj.{tensor}", torch.full((96,), 3, dtype=torch.int32))

    with pytest.raises(ConfigError, match="g_idx has group indices 3 to 3, but they must be from 0 to 2"):
        _open(llama).read(_DOWN)


def test_scales_of_an_activation_are_refused(llama: Path) -> None:
    quantise_checkpoint(awq(16), llama)
    _change(llama, "model.layers.0.mlp.act.scales", torch.ones(96))

    with pytest.raises(ConfigError, match=r"mlp\.act\.scales: AWQ scales of an activation"):
        _open(llama)
