"""Quantised checkpoints on a device that computes with their codes: tokens, logits, memory, and what falls back."""

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine.attention.registered import register
from engine.checkpoints.checkpoint import open_checkpoint
from engine.checkpoints.stored_weights import StoredWeights
from engine.loader import LoadedModel, load_model
from engine.model_folder import open_folder, read_network
from engine.network import load_network
from engine.oracle import Oracle, load_plain
from engine.quantization import kept_int4pack
from engine.quantization.detect import find_quantization
from engine.quantization.kept import KeptLinear
from engine.quantization.kept_int4pack import Int4Format
from engine.quantization.load import make_keeper, plain_weights
from tests.devices import card
from tests.devices.card_device import CardDevice
from tests.devices.fake_device import TRAITS, FakeDevice
from tests.engine.step_runner import generate
from tests.engine.tiny_families import make_family
from tests.engine.tiny_models import make_tiny_model
from tests.engine.tiny_quantised import (
    Scheme,
    Stored,
    awq,
    fp8,
    gptq,
    modelslim,
    packed,
    quantise_checkpoint,
    shift_norms,
    w8a8,
)

_PROMPTS = [[5, 9, 200, 31, 7], [17] * 3 + [4, 250, 96, 12, 300, 44], list(range(40, 75))]
_HOST = ("int4pack-host", "int8")
_FOUR_BITS = (
    awq(32),
    pytest.param(gptq(4, 32), marks=pytest.mark.long),
    pytest.param(gptq(4, 64), marks=pytest.mark.long),  # 96 inputs of a layer are a group and a half: groups of 32
    pytest.param(gptq(4, 32, version="gptq_v2", act_order=True), marks=pytest.mark.long),
    gptq(3, 32),
    packed(4, 32),
    packed(4, 32, symmetric=False),
)
_LAYERS = 14  # linear layers of a tiny Llama but its output layer


def _load(path: Path, *, dtype: str = "float32", formats: tuple[str, ...] = _HOST) -> LoadedModel:
    device = FakeDevice(traits=replace(TRAITS, kept_linears=formats))
    return load_model(path, dtype=dtype, block_size=32, kv_cache_memory=1 << 20, num_threads=1, device=device)


def _note(loaded: LoadedModel) -> str:
    (note,) = (note for note in loaded.notes if "kept" in note or "dequantised" in note)
    return note


def _make(kind: str, path: Path, scheme: Scheme) -> Path:
    folder = make_tiny_model(kind, path / "quantised")
    quantise_checkpoint(scheme, folder)
    return folder


def _network(path: Path, dtype: str, formats: tuple[str, ...]) -> Any:
    """The network with transformers' own attention."""
    layout = find_quantization(path, None)
    with StoredWeights(path) as stored:
        plain = plain_weights(stored, layout, dtype)
        keeper = make_keeper(plain, layout, formats)
        return load_network(open_checkpoint(path), plain.weights, dtype=dtype, attention=None, keep=keeper).network


@pytest.mark.often("awq-32", "gptq_v2-4-32-ordered")
@pytest.mark.parametrize("scheme", _FOUR_BITS, ids=lambda scheme: scheme.name)
def test_tokens_equal_transformers_on_the_dequantised_weights(scheme: Scheme, tmp_path: Path) -> None:
    """In float32 the kernel multiplies the same weights: (code - 8) * scale + zero is exact there."""
    path = _make("llama", tmp_path, scheme)

    loaded = _load(path)
    got = generate(loaded.model, _PROMPTS, 20, chunk=16)

    assert f", kept: {_LAYERS} of {_LAYERS} quantised layers; " in _note(loaded)
    assert got == Oracle(path, "float32").generate_greedy(_PROMPTS, 20, ignore_eos=True)


def test_biases_of_kept_weights_stay(tmp_path: Path) -> None:
    path = _make("qwen2", tmp_path, gptq(4, 32))

    loaded = _load(path)

    assert ", kept: 14 of 14" in _note(loaded)
    got = generate(loaded.model, _PROMPTS, 12, chunk=16)
    assert got == Oracle(path, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)


@pytest.mark.often("w8a8-channel--", "modelslim-w8a8_dynamic--")
@pytest.mark.parametrize(
    ("scheme", "method", "is_shifted"),
    [
        (w8a8("channel"), "compressed-tensors int8", False),
        pytest.param(modelslim("W8A8_MIX"), "ModelSlim W8A8_MIX", False, marks=pytest.mark.long),
        (modelslim("W8A8_DYNAMIC"), "ModelSlim W8A8_DYNAMIC", True),
        (modelslim("W4A8_DYNAMIC"), "ModelSlim W4A8_DYNAMIC", False),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_w8a8_equals_transformers_with_inputs_rounded_by_token(
    scheme: Scheme, method: str, is_shifted: bool, tmp_path: Path
) -> None:
    path = make_tiny_model("llama", tmp_path / "quantised")
    weights = quantise_checkpoint(scheme, path)
    if is_shifted:
        shift_norms(path, weights)
    oracle = Oracle(path, "float32")
    for name, layer in oracle._network.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            layer.register_forward_pre_hook(_round_inputs)

    loaded = _load(path)

    assert _note(loaded).startswith(f"{method}, kept: {_LAYERS} of {_LAYERS} quantised layers; ")
    assert _note(loaded).endswith("; inputs are rounded to int8, token by token")
    assert generate(loaded.model, _PROMPTS, 20, chunk=16) == oracle.generate_greedy(_PROMPTS, 20, ignore_eos=True)


def _round_inputs(_layer: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    values = inputs[0].double()
    steps = values.abs().amax(-1, keepdim=True) / 127
    return ((torch.round(values / steps) * steps).float(),)


@pytest.mark.combinations(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scheme", [awq(32), w8a8("channel")], ids=lambda scheme: scheme.name)
def test_logits_are_those_of_the_dequantised_network_up_to_roundings(
    scheme: Scheme, dtype: str, tmp_path: Path
) -> None:
    """A layer's output moves by u (16 |scales| + 2 |weight|) at most, by 3 u to 5 u of its size at 4 bits, and by half
    a step of 127 (an input's size is a third of the largest) where inputs are int8. The layers' errors are
    independent of each other, so their squares add up.
    """
    path = _make("llama", tmp_path, scheme)
    ids = torch.tensor([_PROMPTS[1]])
    exact = load_plain(path, "float32")(input_ids=ids).logits
    kept, plain = (_network(path, dtype, formats) for formats in (_HOST, ()))
    assert sum(isinstance(layer, KeptLinear) for layer in kept.modules()) == _LAYERS

    far, usual = ((network(input_ids=ids).logits.float() - exact).norm() / exact.norm() for network in (kept, plain))

    step = 1 / 127 if scheme.name.startswith("w8a8") else 5 * torch.finfo(getattr(torch, dtype)).eps / 2
    assert far < usual + step * _LAYERS**0.5


def test_memory_is_that_of_the_codes(tmp_path: Path) -> None:
    path = _make("llama", tmp_path, awq(32))

    kept, plain = (_network(path, "bfloat16", formats) for formats in (_HOST, ()))

    elements = sum(linear.weight.numel() for linear in _quantised(plain))
    saved = sum(map(_held_bytes, _everything(plain))) - sum(map(_held_bytes, _everything(kept)))
    assert saved == elements * 2 - (elements // 2 + elements // 32 * 2 * 2)
    layers = [layer for layer in kept.modules() if isinstance(layer, KeptLinear)]
    assert sum(layer.num_bytes for layer in layers) == elements // 2 + elements // 32 * 4
    assert len(layers) == len([*_quantised(plain)]) == _LAYERS


def _quantised(network: Any) -> Iterator[nn.Linear]:
    return (layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear) and name != "lm_head")


def _everything(network: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor that a network holds, its kernels' too, each memory once."""
    seen: set[int] = set()
    for module in network.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if isinstance(module, KeptLinear):
            kernel: Any = module._kernel
            own += [part for part in (getattr(kernel, f.name) for f in fields(kernel)) if torch.is_tensor(part)]
        for tensor in own:
            if tensor.untyped_storage().data_ptr() not in seen:
                seen.add(tensor.untyped_storage().data_ptr())
                yield tensor


def _held_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@pytest.mark.often("w8a8-channel")
@pytest.mark.parametrize("scheme", [gptq(4, 32, act_order=True), w8a8("channel")], ids=lambda s: s.name)
def test_host_and_device_tensors_are_never_mixed(
    scheme: Scheme, tmp_path: Path
) -> None:  # fmt: skip
    path = _make("llama", tmp_path, scheme)
    device = CardDevice(kept_linears=_HOST)

    loaded = load_model(
        path, dtype="float32", block_size=32, kv_cache_memory=1 << 20, num_threads=1, device=device
    )  # fmt: skip
    with card.count_copies() as seen:
        got = generate(loaded.model, _PROMPTS[1:2], 3, chunk=16)

    assert ", kept: 14 of 14" in _note(loaded)
    assert not [place for place in seen.reads if "/kept" in place]
    assert got == generate(_load(path).model, _PROMPTS[1:2], 3, chunk=16)


def test_the_note_compares_both_sizes(tmp_path: Path) -> None:
    path = _make("llama", tmp_path, awq(32))
    network = _network(path, "bfloat16", _HOST)

    kept = sum(map(_held_bytes, _everything(network)))
    inverse = network.model.rotary_emb.inv_freq.nbytes
    floats = sum(p.numel() * 2 for p in load_plain(path, "bfloat16").parameters())

    register()
    read = read_network(open_folder(path), "bfloat16", kept_linears=_HOST)
    assert read.kept_bytes == sum(layer.num_bytes for layer in network.modules() if isinstance(layer, KeptLinear)) > 0
    assert read.notes == (
        f"AWQ 4-bit, kept: 14 of 14 quantised layers; weights take {(kept - 2 * inverse) / 2**20:.1f} MiB of memory, "
        f"or {floats / 2**20:.1f} MiB if dequantised to bfloat16",
    )


@pytest.mark.parametrize(
    ("scheme", "dtype", "why"),
    [
        (gptq(4, 16), "bfloat16", "int4pack supports groups of 32, 64, 128, 256 inputs, not 16"),
        pytest.param(
            gptq(8, 32), "bfloat16", "there is no kernel for 8-bit codes on this device", marks=pytest.mark.long
        ),
        (fp8(None), "bfloat16", "there is no kernel for float8_e4m3fn codes on this device"),
        (modelslim("W8A16"), "bfloat16", "there is no kernel for 8-bit codes on this device"),
        (modelslim("W8A8"), "bfloat16", "there is no kernel for 8-bit codes of W8A8 on this device"),
        (w8a8("group"), "bfloat16", "int8 multiplication supports one scale per output and no zeros"),
        (
            w8a8("channel", symmetric=False),
            "bfloat16",
            "int8 multiplication supports one scale per output and no zeros",
        ),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_layers_without_a_kernel_are_dequantised_with_a_reason(
    scheme: Scheme, dtype: str, why: str, tmp_path: Path
) -> None:  # fmt: skip
    path = _make("llama", tmp_path, scheme)

    loaded, plain = _load(path, dtype=dtype), _load(path, dtype=dtype, formats=())

    assert f"dequantised to {dtype} at load, as {why}: " in _note(loaded)
    assert "as there is no kernel for them on this device: " in _note(plain)
    tokens = [generate(one.model, _PROMPTS[:1], 6, chunk=16) for one in (loaded, plain)]
    assert tokens[0] == tokens[1]


def test_layers_that_do_not_fit_are_counted_with_the_kept_ones(tmp_path: Path) -> None:
    path = make_family("llama", tmp_path / "llama", intermediate_size=80)
    quantise_checkpoint(gptq(4, 64), path)

    loaded = _load(path)

    assert ", kept: 24 of 28 quantised layers; " in _note(loaded)
    assert _note(loaded).endswith(
        "; 4 dequantised to float32: int4pack supports groups of 32, 64, 128, 256 inputs, "
        "not 16 (stored groups of 64 were divided to fit this rank's cut)"
    )
    got = generate(loaded.model, _PROMPTS, 12, chunk=16)
    assert got == Oracle(path, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)


def test_experts_are_dequantised_beside_kept_attention(tmp_path: Path) -> None:
    path = make_family("mixtral", tmp_path / "mixtral")
    quantise_checkpoint(replace(awq(32), ignore=("lm_head", "gate")), path)

    loaded = _load(path)

    assert ", kept: 16 of 64 " in _note(loaded)
    assert _note(loaded).endswith("; 48 dequantised to float32: they are not linear layers of the network")
    got = generate(loaded.model, _PROMPTS, 12, chunk=16)
    assert got == Oracle(path, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)


def test_a_kernel_that_is_wrong_on_this_device_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _make("llama", tmp_path, awq(32))
    wrong = replace(kept_int4pack.ON_HOST, arrange=lambda codes: codes.to(torch.int32).roll(1, 0))
    monkeypatch.setitem(_formats(), "int4pack-host", Int4Format(wrong))

    loaded = _load(path)

    assert "rounding explains only" in _note(loaded)
    got = generate(loaded.model, _PROMPTS, 12, chunk=16)
    assert got == Oracle(path, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)


def test_a_kernel_that_the_device_refuses_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card's own kernel on a CPU tensor: torch has none."""
    path = _make("llama", tmp_path, awq(32))
    monkeypatch.setitem(_formats(), "int4pack-host", Int4Format(kept_int4pack.ON_CARD))

    loaded = _load(path, dtype="bfloat16")

    assert "as Could not run 'aten::_convert_weight_to_int4pack'" in _note(loaded)
    assert "kept" not in _note(loaded)


def _formats() -> Any:
    from engine.quantization import kept_table

    return kept_table.FORMATS


@pytest.mark.parametrize(
    ("inputs", "kept"),
    [
        ({"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}, True),
        ({"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor"}, False),
        ({"num_bits": 8, "type": "int", "dynamic": True, "symmetric": False}, False),
        ({"num_bits": 8, "type": "int", "dynamic": True, "strategy": "group"}, False),
        ({"num_bits": 8, "type": "float", "dynamic": True}, False),
        (None, False),
    ],
)
def test_inputs_are_rounded_only_as_the_checkpoint_specifies(
    inputs: dict[str, Any] | None, kept: bool, tmp_path: Path
) -> None:
    path = _make("llama", tmp_path, w8a8("channel"))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs
    (path / "config.json").write_text(json.dumps(config))

    assert (", kept: 14 of 14" in _note(_load(path))) == kept


def test_an_output_layer_that_is_quantised_is_kept_too(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path / "llama")
    quantise_checkpoint(replace(gptq(4, 32), ignore=()), path)

    loaded = _load(path)

    assert ", kept: 15 of 15" in _note(loaded)
    got = generate(loaded.model, _PROMPTS, 12, chunk=16)
    assert got == Oracle(path, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)


def test_a_decoder_without_output_layer_keeps_layer_names(tmp_path: Path) -> None:
    path = _make("llama", tmp_path, awq(32))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    tensors = load_file(path / "model.safetensors")
    save_file(
        {name.removeprefix("model."): values for name, values in tensors.items() if name != "lm_head.weight"},
        path / "model.safetensors", metadata={"format": "pt"},
    )  # fmt: skip
    register()

    read = read_network(open_folder(path), "float32", kept_linears=_HOST)

    assert read.kept_bytes > 0
    assert ", kept: 14 of 14 quantised layers; " in read.notes[0]


def test_a_tied_output_layer_stays_in_floats(tmp_path: Path) -> None:
    """Its weight is the embeddings', which are looked up."""
    path = make_tiny_model("llama", tmp_path / "llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    _drop(path, "lm_head.weight")
    quantise_checkpoint(awq(32), path)

    loaded = _load(path)

    assert ", kept: 14 of 14" in _note(loaded)
    got = generate(loaded.model, _PROMPTS, 12, chunk=16)
    assert got == Oracle(path, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)


def _drop(path: Path, name: str) -> None:
    tensors: Stored = load_file(path / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
