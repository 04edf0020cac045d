"""Loading: what is refused with which message, what is detected, what is reported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from devices.host_memory import available_bytes
from engine.checkpoints.checkpoint import open_checkpoint
from engine.checkpoints.dtypes import choose_dtype, read_cpu_flags
from engine.loader import LoadedModel, load_model
from tests.engine.tiny_models import KINDS, MAX_MODEL_LEN, VOCAB_SIZE, make_tiny_model
from wire.errors import ConfigError
from wire.kv_layout import KvTensor

_BUDGET = 1 << 20


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "tiny-llama")


def _load(path: Path, **changes: Any) -> LoadedModel:
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 16, "kv_cache_memory": _BUDGET, "num_threads": 1}
    return load_model(path, **{**settings, **changes})


def _change_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_info_describes_the_loaded_model(llama: Path) -> None:
    info = _load(llama).model.info

    assert (info.model.name, info.vocab_size, info.dtype, info.device) == ("tiny-llama", VOCAB_SIZE, "float32", "cpu")
    assert (info.max_model_len, info.eos_token_ids) == (MAX_MODEL_LEN, (2,))
    assert info.layout.tensors[:2] == (KvTensor(0, "k", 2, 16, "float32"), KvTensor(0, "v", 2, 16, "float32"))


@pytest.mark.parametrize("kind", KINDS)
def test_kv_layout_is_found_for_every_kind(kind: str, tmp_path: Path) -> None:
    layout = _load(make_tiny_model(kind, tmp_path)).model.info.layout

    heads = 4 if kind == "opt" else 2
    assert layout.num_layers == 2
    assert {(tensor.heads, tensor.head_dim) for tensor in layout.tensors} == {(heads, 16)}
    assert layout.total_bytes <= _BUDGET


def test_notes_name_dtype_and_pool(llama: Path) -> None:
    notes = _load(llama, dtype="auto").notes

    assert "float32" in notes[0]
    assert "KV pool: 1 MiB" in notes[1]
    assert f"longest sequence {MAX_MODEL_LEN} tokens" in notes[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_explicit_dtype_is_that_of_weights_and_pool(llama: Path, dtype: str) -> None:
    model = _load(llama, dtype=dtype).model

    assert {tensor.dtype for tensor in model.info.layout.tensors} == {dtype}
    assert next(model._network.parameters()).dtype == getattr(torch, dtype)


def test_the_pool_is_not_touched_at_start(llama: Path) -> None:
    model = _load(llama, kv_cache_memory=256 << 20).model

    assert model.memory.fd is not None
    assert Path(f"/proc/self/fd/{model.memory.fd}").stat().st_blocks == 0


def test_eos_ids_come_from_the_generation_config(llama: Path) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))

    assert _load(llama).model.info.eos_token_ids == (2, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}, "bloom has ALiBi"),
        ({"model_type": "t5"}, "t5"),
        ({"model_type": "no-such-model"}, "model type no-such-model is not supported by transformers"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of type linear_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "says GPTQ 4-bit, but no tensor"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised by bitsandbytes"),
        ({"intermediate_size": 100}, "mismatched keys"),
        ({"num_hidden_layers": 3}, "missing keys"),
    ],
)
def test_unsupported_models_are_refused_by_name(llama: Path, changes: dict[str, Any], words: str) -> None:
    _change_config(llama, **changes)

    with pytest.raises(ConfigError, match=words):
        _load(llama)


def test_a_checkpoint_without_safetensors_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")

    with pytest.raises(ConfigError, match=r"no safetensors weights, only pytorch_model.bin"):
        _load(llama)


def test_missing_weights_are_refused_not_made_up(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=r"missing keys \(1\), the first is model.layers.1.mlp.up_proj.weight"):
        _load(llama)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config.json"):
        _load(tmp_path)


def test_a_path_that_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"none is not a model folder: there is no such folder$"):
        _load(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"file is not a model folder: it is a file$"):
        _load(tmp_path / "file")


@pytest.mark.parametrize("length", [0, MAX_MODEL_LEN + 1])
def test_a_length_the_model_does_not_have_is_refused(llama: Path, length: int) -> None:
    with pytest.raises(ConfigError, match=f"--max-model-len is {length}.*{MAX_MODEL_LEN}"):
        _load(llama, max_model_len=length)


def test_a_shorter_length_is_accepted(llama: Path) -> None:
    assert _load(llama, max_model_len=100).model.info.max_model_len == 100


def test_unknown_choices_are_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="dtype 'int3'"):
        _load(llama, dtype="int3")
    with pytest.raises(ConfigError, match="attention backend 'magic'"):
        _load(llama, attention_backend="magic")


@pytest.mark.parametrize(
    ("checkpoint", "flags", "expected"),
    [
        ("bfloat16", {"avx512_bf16"}, "bfloat16"),
        ("bfloat16", {"amx_bf16", "avx512f"}, "bfloat16"),
        ("bfloat16", {"avx512f"}, "float32"),
        ("float16", {"avx512_bf16"}, "float32"),
        ("float32", {"avx512_bf16"}, "float32"),
    ],
)
def test_auto_chooses_bfloat16_where_the_cpu_is_fast_at_it(checkpoint: str, flags: set[str], expected: str) -> None:
    choice = choose_dtype("auto", checkpoint, cpu_flags=frozenset(flags))

    assert choice.name == expected
    assert expected in choice.reason


@pytest.mark.parametrize(("checkpoint", "expected"), [("bfloat16", "bfloat16"), ("float16", "float32")])
def test_auto_chooses_bfloat16_where_native_kernels_run_the_model(checkpoint: str, expected: str) -> None:
    choice = choose_dtype("auto", checkpoint, cpu_flags=frozenset({"avx512f"}), is_native=True)

    assert choice.name == expected
    assert expected in choice.reason


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float8_e4m3fn"}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_a_checkpoints_dtype_is_its_configs_or_most_weights(config: dict[str, str], expected: str, llama: Path) -> None:
    """The first float tensor by name is the scale of a quantised output layer, and larger than all weights."""
    tensors = {name: one.bfloat16() for name, one in load_file(llama / "model.safetensors").items()}
    tensors["lm_head.weight_scale"] = torch.ones(sum(one.numel() for one in tensors.values()))
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    file = llama / "config.json"
    others = {key: value for key, value in json.loads(file.read_text()).items() if key != "dtype"}
    file.write_text(json.dumps({**others, **config}))

    assert open_checkpoint(llama).stored_dtype == expected


def test_cpu_flags_are_read_by_name(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t: fpu avx512_bf16\nFeatures : fp bf16\n")

    assert read_cpu_flags(tmp_path / "cpuinfo") in ({"fpu", "avx512_bf16"}, {"fp", "bf16"})
    assert read_cpu_flags(tmp_path / "missing") == frozenset()


def test_available_memory_is_bounded_by_the_cgroup(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 8000 kB\nMemAvailable: 5000 kB\n")

    assert available_bytes(tmp_path / "meminfo", tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == 2_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == 5000 * 1024
