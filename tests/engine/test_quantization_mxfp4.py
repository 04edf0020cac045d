"""MXFP4 experts of gpt-oss: against transformers' own arithmetic, part by part, and served."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.checkpoints.stored_weights import StoredWeights
from engine.checkpoints.weights import TensorSlice
from engine.loader import load_model
from engine.oracle import Oracle, load_plain
from engine.quantization.kept_experts import KeptExperts
from engine.quantization.mxfp4 import Mxfp4Layout
from engine.quantization.weights import DequantisingWeights
from tests.devices.fake_device import TRAITS, FakeDevice
from tests.engine.rank_logits import load_rank, rank_logits
from tests.engine.step_runner import generate
from tests.engine.tiny_families import make_family
from wire.errors import ConfigError
from wire.kv_layout import Rank

_DOWN = "model.layers.0.mlp.experts.down_proj"
_PROMPTS = [[5, 9, 200, 31, 7], list(range(40, 75))]


def _quantise(path: Path) -> dict[str, torch.Tensor]:
    """Replace experts by random MXFP4 blocks of about their size; return the tensors by transformers' arithmetic."""
    stored, expected = {}, {}
    generator = torch.Generator().manual_seed(0)
    for name, values in load_file(path / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = expected[name] = values
            continue
        experts, inputs, outputs = values.shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 125, shape[:3], dtype=torch.uint8, generator=generator)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return expected


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    return make_family("gpt_oss", tmp_path / "gpt-oss", intermediate_size=96)


def test_experts_dequantise_as_in_transformers(gpt_oss: Path) -> None:
    expected = _quantise(gpt_oss)

    weights = DequantisingWeights(StoredWeights(gpt_oss), Mxfp4Layout(), torch.float32)

    assert list(weights.names) == sorted(expected)
    for name, values in expected.items():
        assert weights.shape(name) == tuple(values.shape), name
        assert torch.equal(weights.read(name), values), name


@pytest.mark.parametrize(
    "part",
    [TensorSlice(0, 1, 3), TensorSlice(1, 32, 64), TensorSlice(1, 5, 70), TensorSlice(2, 3, 40), TensorSlice(2, 7, 7)],
)
def test_a_part_equals_the_slice_of_the_whole(part: TensorSlice, gpt_oss: Path) -> None:
    whole = _quantise(gpt_oss)[_DOWN]
    weights = DequantisingWeights(StoredWeights(gpt_oss), Mxfp4Layout(), torch.float32)

    assert torch.equal(weights.read(_DOWN, part), whole.narrow(part.dim, part.start, part.end - part.start))


def test_every_nibble_and_scale_is_exact(tmp_path: Path) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 4, 4, 16)
    scales = torch.tensor([0, 1, 2, 60, 100, 126, 127, 128, 129, 150, 180, 200, 220, 230, 240, 250], dtype=torch.uint8)
    tensors = {"x.down_proj_blocks": blocks, "x.down_proj_scales": scales.reshape(1, 4, 4)}
    save_file(tensors, tmp_path / "model.safetensors")

    got = DequantisingWeights(StoredWeights(tmp_path), Mxfp4Layout(), torch.float32).read("x.down_proj")

    expected = convert_moe_packed_tensors(blocks, scales.reshape(1, 4, 4), dtype=torch.float32)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("formats", [(), ("experts-widened",)], ids=["dequantised", "kept"])
def test_tokens_equal_transformers_on_the_dequantised_weights(
    formats: tuple[str, ...], gpt_oss: Path, tmp_path: Path
) -> None:
    plain = make_family("gpt_oss", tmp_path / "plain", intermediate_size=96)
    save_file(_quantise(gpt_oss), plain / "model.safetensors", metadata={"format": "pt"})
    expected = Oracle(plain, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)

    loaded = load_model(
        gpt_oss, dtype="float32", block_size=16, kv_cache_memory=1 << 20, num_threads=1, quantization="mxfp4",
        device=FakeDevice(traits=replace(TRAITS, kept_linears=formats)),
    )  # fmt: skip

    assert generate(loaded.model, _PROMPTS, 12, chunk=16) == expected
    said = "mxfp4, kept: 8 of 8 quantised layers" if formats else "warning: mxfp4 weights are dequantised to float32"
    assert said in " ".join(loaded.notes)


@pytest.mark.parametrize("formats", [(), ("experts-widened",)], ids=["dequantised", "kept"])
def test_two_ranks_are_the_dequantised_model(formats: tuple[str, ...], gpt_oss: Path, tmp_path: Path) -> None:
    plain = make_family("gpt_oss", tmp_path / "plain", intermediate_size=96)
    save_file(_quantise(gpt_oss), plain / "model.safetensors", metadata={"format": "pt"})
    token_ids = torch.tensor(_PROMPTS[1:])
    with torch.inference_mode():
        expected = load_plain(plain, "float32")(input_ids=token_ids, use_cache=False).logits

    own, _ = rank_logits(gpt_oss, 2, token_ids, formats=formats)

    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_kept_experts_have_the_memory_of_their_blocks(num_ranks: int, tmp_path: Path) -> None:
    """4 bits, and for each 32 inputs a scale of 16."""
    path = make_family("gpt_oss", tmp_path / "gpt-oss", intermediate_size=128)
    experts = {name: values for name, values in _quantise(path).items() if name.endswith(("gate_up_proj", "down_proj"))}

    for number in range(num_ranks):
        network = load_rank(path, Rank(number, num_ranks), lambda _: None, formats=("experts-widened",))
        held = sum(module.num_bytes for module in network.modules() if isinstance(module, KeptExperts))

        assert held == sum(values.numel() for values in experts.values()) * 4.5 / 8 / num_ranks


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        (None, "MXFP4 blocks but no .*down_proj_scales"),
        (torch.zeros(1, 4, 3, dtype=torch.uint8), r"blocks \(1, 4, 4, 16\) and scales \(1, 4, 3\)"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(scales: torch.Tensor | None, words: str, tmp_path: Path) -> None:
    tensors = {"x.down_proj_blocks": torch.zeros(1, 4, 4, 16, dtype=torch.uint8)}
    save_file(tensors | ({} if scales is None else {"x.down_proj_scales": scales}), tmp_path / "model.safetensors")

    with pytest.raises(ConfigError, match=words):
        DequantisingWeights(StoredWeights(tmp_path), Mxfp4Layout(), torch.float32)
