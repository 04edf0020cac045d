"""--kv-cache-memory is checked against the model before anything starts; the engine's own probe is the oracle."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.checkpoints.checkpoint import open_checkpoint
from engine.checkpoints.model_identity import read_json
from engine.kv_probe import rehearse
from flags.options import EngineOptions
from pdserve import kv_memory_check
from pdserve.kv_memory_check import check_kv_room, kv_tensors
from tests.engine.tiny_models import KINDS, make_tiny_model
from wire.errors import ConfigError


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    return EngineOptions(model=str(folder), dtype="float32")


@pytest.mark.parametrize("kind", KINDS)
def test_config_json_gives_the_kv_size_the_engine_finds(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_model(kind, tmp_path)

    reported = kv_tensors(read_json(folder / "config.json"), "bfloat16", 1)

    assert reported == rehearse(open_checkpoint(folder), "bfloat16")


def test_a_head_on_two_ranks_counts_twice(llama: EngineOptions) -> None:
    config = read_json(Path(llama.model) / "config.json")

    by_ranks = {ranks: sum(one.token_bytes for one in kv_tensors(config, "float32", ranks)) for ranks in (1, 2, 4)}

    assert by_ranks == {1: 512, 2: 512, 4: 1024}  # 2 layers x (key, value) x 2 heads x 16 numbers x 4 bytes


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "deepseek_v2", "num_hidden_layers": 2},
        {"model_type": "llama", "num_key_value_heads": "2", "num_hidden_layers": 2, "head_dim": 8},
        {"model_type": "llama", "num_key_value_heads": 2, "num_hidden_layers": 2, "num_attention_heads": 0,
         "hidden_size": 8},
        {"model_type": "qwen3", "num_key_value_heads": 2, "num_hidden_layers": 2, "num_attention_heads": 4,
         "hidden_size": 64},
    ],
)  # fmt: skip
def test_sizes_missing_in_config_json_are_left_to_the_engine(config: dict[str, object]) -> None:
    assert kv_tensors(config, "float32", 1) == ()


def test_a_pool_too_small_is_refused_with_the_minimum(
    llama: EngineOptions,
) -> None:
    minimum = 16 * 512 + 4 * 4095

    with pytest.raises(
        ConfigError, match=rf"20000 bytes of KV memory are 0 blocks .* raise --kv-cache-memory to {minimum} "
    ):
        check_kv_room(replace(llama, kv_cache_memory=20000), 2, is_here=True)
    check_kv_room(replace(llama, kv_cache_memory=minimum), 2, is_here=True)


def test_weights_of_another_dtype_count_as_the_smaller_one(llama: EngineOptions, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((Path(llama.model) / "config.json").read_bytes())
    options = replace(llama, model=str(tmp_path), dtype="auto", kv_cache_memory=16 * 256 + 4 * 4095)

    check_kv_room(options, 2, is_here=True)
    with pytest.raises(ConfigError, match="0 blocks of 16 tokens"):
        check_kv_room(replace(options, kv_cache_memory=16 * 256), 2, is_here=True)


def test_local_pools_larger_than_free_memory_are_refused(llama: EngineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory_check, "available_bytes", lambda: 10_000_000)
    requested = replace(llama, kv_cache_memory=6_000_000)

    with pytest.raises(ConfigError, match=r"6000000 bytes in each of 2 instances is 12000000 bytes, but only 10000000"):
        check_kv_room(requested, 2, is_here=True)
    check_kv_room(requested, 1, is_here=True)
    check_kv_room(requested, 2, is_here=False)


def test_a_fake_engine_has_its_own_kind_of_pool(tmp_path: Path) -> None:
    check_kv_room(EngineOptions(model=str(tmp_path), engine="fake", kv_cache_memory=1), 2, is_here=True)
