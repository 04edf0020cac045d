"""Quantised checkpoints loaded and run: their tokens are those of transformers on what plain arithmetic dequantises."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.added_biases import add_biases
from engine.checkpoints.checkpoint import open_checkpoint
from engine.checkpoints.stored_weights import StoredWeights
from engine.loader import LoadedModel, load_model
from engine.network import load_network
from engine.oracle import Oracle, load_plain
from engine.quantization.detect import find_quantization
from engine.quantization.load import plain_weights
from engine.sharding.cut import shard_network
from tests.engine.step_runner import generate
from tests.engine.tiny_families import make_family
from tests.engine.tiny_models import make_tiny_model
from tests.engine.tiny_quantised import (
    Scheme,
    awq,
    fp8,
    gptq,
    hf_fp8,
    modelslim,
    packed,
    quantise_checkpoint,
    shift_norms,
    w8a8,
)
from wire.errors import ConfigError
from wire.kv_layout import Rank

_PROMPTS = [[5, 9, 200, 31, 7], [17] * 3 + [4, 250, 96, 12, 300, 44], list(range(40, 75))]
_SCHEMES = (
    pytest.param(gptq(4, 32), marks=pytest.mark.long),
    gptq(4, 16, version="gptq_v2", act_order=True),
    awq(16),
    w8a8("channel"),
    packed(4, 16, symmetric=False),
    fp8((24, 40)),
    pytest.param(modelslim("W8A8_MIX"), marks=pytest.mark.long),  # its biases are in a test of their own
    modelslim("W4A8_DYNAMIC"),
)


def _load(path: Path, **changes: Any) -> LoadedModel:
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 16, "kv_cache_memory": 1 << 20, "num_threads": 1}
    return load_model(path, **{**settings, **changes})


def _make(kind: str, path: Path, scheme: Scheme) -> tuple[Path, Path]:
    """Return a quantised checkpoint, and the same model with the weights it must have, in plain floats."""
    quantised, plain = (make_tiny_model(kind, path / name) for name in ("quantised", "plain"))
    expected = quantise_checkpoint(scheme, quantised)
    save_file(expected, plain / "model.safetensors", metadata={"format": "pt"})
    return quantised, plain


@pytest.mark.often("w8a8-channel", "gptq-4-32")
@pytest.mark.parametrize("scheme", _SCHEMES, ids=lambda scheme: scheme.name)
def test_tokens_equal_transformers_on_the_dequantised_weights(scheme: Scheme, tmp_path: Path) -> None:
    quantised, plain = _make("llama", tmp_path, scheme)
    expected = Oracle(plain, "float32").generate_greedy(_PROMPTS, 20, ignore_eos=True)

    got = generate(_load(quantised, quantization=scheme.method).model, _PROMPTS, 20, chunk=16)

    assert got == expected


def test_the_oracle_runs_a_quantised_checkpoint_in_plain_transformers(tmp_path: Path) -> None:
    quantised, plain = _make("llama", tmp_path, awq(16))

    ours, expected = (
        Oracle(path, "float32").generate_greedy(_PROMPTS, 8, ignore_eos=True) for path in (quantised, plain)
    )

    assert ours == expected


@pytest.mark.parametrize("scheme", [gptq(4, 16, act_order=True), awq(16), w8a8("channel")], ids=lambda s: s.name)
def test_a_rank_holds_its_slices_of_the_dequantised_weights(scheme: Scheme, tmp_path: Path) -> None:
    paths = _make("llama", tmp_path, scheme)

    for number in range(2):
        quantised, plain = (_rank_state(path, Rank(number, 2)) for path in paths)
        assert quantised.keys() == plain.keys()
        assert all(torch.equal(quantised[name], values) for name, values in plain.items())


def _rank_state(path: Path, rank: Rank) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    with StoredWeights(path) as stored:
        network = load_network(
            checkpoint, plain_weights(stored, find_quantization(path, None), "float32").weights,
            dtype="float32", attention=None,
            shard=lambda whole: shard_network(whole, checkpoint.text_config, rank, lambda tensor: None),
        ).network  # fmt: skip
    return dict(network.state_dict())


@pytest.mark.parametrize("scheme", [awq(16), modelslim("W8A8_DYNAMIC")], ids=lambda scheme: scheme.name)
def test_experts_quantised_one_by_one_become_fused_ones(scheme: Scheme, tmp_path: Path) -> None:
    """Mixtral's checkpoints have a linear layer for each expert, its network one tensor for all."""
    quantised, plain = (make_family("mixtral", tmp_path / name) for name in ("quantised", "plain"))
    expected = quantise_checkpoint(replace(scheme, ignore=("lm_head", "gate")), quantised)
    save_file(expected, plain / "model.safetensors", metadata={"format": "pt"})
    tokens = Oracle(plain, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)

    assert generate(_load(quantised).model, _PROMPTS, 12, chunk=16) == tokens


def test_biases_of_quantised_weights_stay(tmp_path: Path) -> None:
    quantised, plain = _make("qwen2", tmp_path, gptq(4, 32))
    expected = Oracle(plain, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)

    assert generate(_load(quantised).model, _PROMPTS, 12, chunk=16) == expected


def test_biases_that_modelslim_adds_are_computed(tmp_path: Path) -> None:
    shifted, plain = _make("llama", tmp_path, modelslim("W8A8_MIX"))
    shift_norms(shifted, load_file(plain / "model.safetensors"))
    (shifted / "model.safetensors").rename(shifted / "quant_model_weight_w8a8.safetensors")  # its own name
    expected = Oracle(plain, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)

    assert generate(_load(shifted).model, _PROMPTS, 12, chunk=16) == expected
    assert Oracle(shifted, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True) == expected


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(8, 8, bias=False), nn.LayerNorm(8, bias=False), LlamaRMSNorm(8)],
    ids=lambda one: type(one).__name__,
)
def test_an_added_bias_is_added_once(layer: nn.Module, tmp_path: Path) -> None:
    rows, bias = torch.randn(3, 8), torch.arange(8.0)
    expected = layer(rows) + bias
    save_file({"0.bias": bias}, tmp_path / "model.safetensors")

    add_biases(nn.Sequential(layer), StoredWeights(tmp_path))

    torch.testing.assert_close(layer(rows), expected)


@pytest.fixture(params=[False, True], ids=["", "by transformers"])
def mixture(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mixture of experts; with the parameter transformers would load it, as if its experts could not be stacked."""
    if request.param:
        monkeypatch.setattr("engine.checkpoints.tensor_sources._merged", lambda converter, stored: None)
    return make_family("qwen3_moe", tmp_path)


def test_an_added_bias_of_a_router_is_refused(mixture: Path) -> None:
    path = mixture
    stored = quantise_checkpoint(modelslim("W8A8_DYNAMIC"), path)
    name = next(name for name in stored if name.endswith("mlp.gate.weight")).replace("weight", "bias")
    tensors = load_file(path / "model.safetensors") | {name: torch.ones(4)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=r"mlp\.gate\.bias is not zero, but its layer cannot have a bias"):
        _load(path)


def test_codes_that_no_config_describes_are_refused(mixture: Path) -> None:
    path = mixture
    quantise_checkpoint(modelslim("W8A8"), path)
    (path / "model.safetensors").rename(path / "quant_model_weight_w8a8.safetensors")
    (path / "quant_model_description.json").unlink()

    with pytest.raises(ConfigError, match=r"\.weight is stored as int8, and no quantization config describes it"):
        _load(path)


@pytest.mark.parametrize("scheme", [fp8(None), hf_fp8((24, 40))], ids=lambda scheme: scheme.name)
def test_float8_with_a_scale_that_no_config_describes_is_refused(scheme: Scheme, tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    quantise_checkpoint(scheme, path, note_in="unread.json")
    refusal = r"\.weight is stored as float8_e4m3fn, and no quantization config describes it"

    with pytest.raises(ConfigError, match=refusal):
        _load(path)

    plain = {name: one for name, one in load_file(path / "model.safetensors").items() if "weight_scale" not in name}
    save_file(plain, path / "model.safetensors", metadata={"format": "pt"})
    _load(path).model.close()


def test_one_note_warns_of_the_memory(tmp_path: Path) -> None:
    quantised, plain = _make("llama", tmp_path, w8a8("channel"))

    notes = [note for note in _load(quantised).notes if note.startswith("warning: ")]

    held = sum(p.numel() * 4 for p in load_plain(plain, "float32").parameters())
    stored = (quantised / "model.safetensors").stat().st_size
    assert notes == [
        "warning: compressed-tensors int8 weights are dequantised to float32 at load, as there is no kernel for them "
        f"on this device: {stored / 2**20:.1f} MiB stored take {held / 2**20:.1f} MiB of memory; inputs are not "
        "quantised"
    ]
    assert not [note for note in _load(plain).notes if "dequantised" in note]


def test_a_contradiction_is_refused_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised, _ = _make("llama", tmp_path, awq(16))
    monkeypatch.setattr(
        "engine.checkpoints.stored_weights.StoredWeights.read", lambda *_: pytest.fail("weights were read")
    )

    with pytest.raises(ConfigError, match=r"--quantization gptq, but .*config\.json says awq"):
        _load(quantised, quantization="gptq")


def test_float_inputs_are_nearer_to_the_model_than_int8_ones() -> None:
    """Leaving inputs in floats drops an error: of a product by W8A8, at most half a step of each input."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator, dtype=torch.float64)
    inputs = torch.randn(16, 64, generator=generator, dtype=torch.float64)
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = torch.round(weight / scale)
    step = inputs.abs().amax(1, keepdim=True) / 127  # by token, as `dynamic` has it

    exact = inputs @ weight.T
    ours = inputs @ (codes * scale).T
    w8a8_product = torch.round(inputs / step) @ codes.T * step * scale.T

    assert ((w8a8_product - ours).abs() <= step / 2 * (codes * scale).abs().sum(1)).all()
    assert (ours - exact).norm() < (w8a8_product - exact).norm()
