"""Our loading equals transformers' own, tensor by tensor, for every kind of checkpoint."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from engine.checkpoints.checkpoint import open_checkpoint
from engine.checkpoints.load_progress import LoadProgress
from engine.checkpoints.stored_weights import StoredWeights
from engine.network import LoadedNetwork, load_network
from engine.oracle import load_plain
from tests.engine.tiny_families import make_family
from tests.engine.tiny_models import KINDS, VOCAB_SIZE, make_tiny_model
from wire.errors import ConfigError

_MOE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 128,
}  # fmt: skip
_CONFIGS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: MixtralConfig(**_MOE, num_local_experts=4),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_MOE, head_dim=16, num_experts=4, moe_intermediate_size=32),
}


def _load(path: Path, dtype: str = "float32") -> LoadedNetwork:
    with StoredWeights(path) as weights:
        return load_network(open_checkpoint(path), weights, dtype=dtype, attention=None)


def _assert_same(mine: Any, theirs: Any) -> None:
    for kind in ("named_parameters", "named_buffers"):
        own, wanted = (dict(getattr(one, kind)(remove_duplicate=False)) for one in (mine, theirs))
        assert own.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert own[name].device == tensor.device, name
            assert own[name].dtype == tensor.dtype, name
            assert torch.equal(own[name], tensor), name


def _change_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("kind", "dtype", "wide"),
    [("deepseek_v3", "bfloat16", "e_score_correction_bias"), ("gpt_oss", "float16", "input_layernorm")],
)
def test_weights_a_model_keeps_in_float32_stay_float32(tmp_path: Path, kind: str, dtype: str, wide: str) -> None:
    path = make_family(kind, tmp_path)

    loaded = _load(path, dtype)

    _assert_same(loaded.network, load_plain(path, dtype))
    kept = {name for name, tensor in loaded.network.state_dict().items() if tensor.dtype == torch.float32}
    assert any(wide in name for name in kept)
    assert loaded.note is None


@pytest.mark.combinations(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_is_transformers(tmp_path: Path, kind: str, dtype: str) -> None:
    path = make_tiny_model(kind, tmp_path)

    loaded = _load(path, dtype)

    _assert_same(loaded.network, load_plain(path, dtype))
    assert loaded.note is None


@pytest.mark.parametrize("kind", _CONFIGS)
def test_experts_stored_one_by_one_are_fused_as_by_transformers(tmp_path: Path, kind: str) -> None:
    AutoModelForCausalLM.from_config(_CONFIGS[kind](), dtype=torch.float32).save_pretrained(tmp_path)
    assert any(".experts.3." in name for name in load_file(tmp_path / "model.safetensors"))

    loaded = _load(tmp_path)

    _assert_same(loaded.network, load_plain(tmp_path, "float32"))
    assert loaded.note is None


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_tied_weights_stay_tied(tmp_path: Path, kind: str) -> None:
    path = make_tiny_model(kind, tmp_path)
    _change_config(path, tie_word_embeddings=True)
    stored = load_file(path / "model.safetensors")
    stored.pop("lm_head.weight", None)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})

    network = _load(path).network

    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight
    _assert_same(network, load_plain(path, "float32"))


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_weight_stored_twice_is_tied_only_where_equal(tmp_path: Path, equal: bool) -> None:
    path = make_tiny_model("llama", tmp_path)
    _change_config(path, tie_word_embeddings=True)
    stored = load_file(path / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone() + (0.0 if equal else 1.0)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})

    network = _load(path).network

    assert (network.lm_head.weight is network.model.embed_tokens.weight) == equal
    _assert_same(network, load_plain(path, "float32"))


def test_a_base_models_names_get_their_prefix(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    stored = load_file(path / "model.safetensors")
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in stored.items()},
        path / "model.safetensors", metadata={"format": "pt"},
    )  # fmt: skip

    _assert_same(_load(path).network, load_plain(path, "float32"))


def test_a_checkpoint_of_several_files_is_one(tmp_path: Path) -> None:
    path = make_tiny_model("qwen3", tmp_path)
    network = load_plain(path, "float32")
    (path / "model.safetensors").unlink()
    network.save_pretrained(path, max_shard_size="100KB")
    assert len([*path.glob("*.safetensors")]) > 2

    _assert_same(_load(path).network, network)


def test_formats_only_transformers_converts_are_loaded_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    AutoModelForCausalLM.from_config(_CONFIGS["mixtral"](), dtype=torch.float32).save_pretrained(tmp_path)
    monkeypatch.setattr("engine.checkpoints.tensor_sources._merged", lambda converter, stored: None)

    loaded = _load(tmp_path)

    _assert_same(loaded.network, load_plain(tmp_path, "float32"))
    assert "transformers" in (loaded.note or "")


def test_formats_transformers_converts_cannot_be_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    AutoModelForCausalLM.from_config(_CONFIGS["mixtral"](), dtype=torch.float32).save_pretrained(tmp_path)
    monkeypatch.setattr("engine.checkpoints.tensor_sources._merged", lambda converter, stored: None)

    with StoredWeights(tmp_path) as weights, pytest.raises(ConfigError, match="--tensor-parallel-size 1"):
        load_network(open_checkpoint(tmp_path), weights, dtype="float32", attention=None, shard=lambda network: {})
    assert weights.bytes_read == 0


def test_eos_ids_of_the_generation_config_are_taken(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))

    assert _load(path).network.generation_config.eos_token_id == [7, 2]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_progress_bar() -> None:
    terminal = _Terminal()

    with LoadProgress(2_000_000, stream=terminal) as progress:
        progress.advance(1_000_000)
        progress.advance(1_000_000)

    assert "weights" in terminal.getvalue()
    assert "2.00M" in terminal.getvalue()


def test_a_log_gets_lines_with_bytes_at_intervals(capfd: pytest.CaptureFixture[str]) -> None:
    now, lines = [0.0], []
    with LoadProgress(100, stream=io.StringIO(), clock=lambda: now[0]) as progress:
        progress._log = lambda: lines.append(progress._done)  # type: ignore[method-assign]
        for seconds in range(1, 6):
            now[0] = seconds
            progress.advance(10)

    assert lines == [20, 40, 50]
