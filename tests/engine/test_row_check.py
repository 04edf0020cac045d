"""A model whose rows interact outside attention is found on its weights; models known to the tests are not checked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import row_check
from engine.attention.registered import NAME, register
from engine.checkpoints.checkpoint import open_checkpoint
from engine.kv_probe import find_kv_tensors
from engine.loader import load_model
from engine.models.families import FAMILIES
from engine.row_check import check_rows
from tests.engine.tiny_families import NAMED, make_family, save_random
from wire.errors import ConfigError


def _network(folder: Path, model_type: str, dtype: str, **settings: Any) -> Any:
    register()
    return AutoModelForCausalLM.from_pretrained(
        save_random(settings, model_type, folder), dtype=getattr(torch, dtype), attn_implementation=NAME
    ).eval()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_convolution_outside_attention_is_found(dtype: str, tmp_path: Path) -> None:
    network = _network(tmp_path, "lfm2", dtype, layer_types=["conv", "full_attention"] * 2)

    with pytest.raises(ConfigError, match=r"lfm2: logits differ .* keep a state besides attention"):
        check_rows(network, dtype)


@pytest.mark.combinations(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "qwen3_moe", "afmoe"])
def test_rows_interacting_only_in_attention_pass(model_type: str, dtype: str, tmp_path: Path) -> None:
    check_rows(_network(tmp_path, model_type, dtype), dtype)


def test_positions_counted_from_the_start_of_the_step_are_found(tmp_path: Path) -> None:
    network = _network(tmp_path, "gpt2", "float32")
    network.transformer.wpe.register_forward_pre_hook(
        lambda _, args: (torch.arange(args[0].shape[1])[None],)
    )  # fmt: skip

    with pytest.raises(ConfigError, match="gpt2: logits differ"):
        check_rows(network, "float32")


def test_changes_at_high_positions_only_are_found(tmp_path: Path) -> None:
    network = _network(tmp_path, "gpt2", "float32")
    network.transformer.wpe.register_forward_pre_hook(
        lambda _, args: (torch.where(args[0] > 100, args[0] - args[0].shape[1], args[0]),)
    )

    with pytest.raises(ConfigError, match=r"gpt2: logits differ .* at position 511"):
        check_rows(network, "float32")


def test_attentions_arguments_are_compared(tmp_path: Path) -> None:
    network = _network(tmp_path, "llama", "float32")
    network.model.layers[2].self_attn.q_proj.register_forward_hook(lambda _, args, out: out * args[0].shape[1])

    with pytest.raises(ConfigError, match="llama: logits differ"):
        check_rows(network, "float32")


@pytest.mark.parametrize("count", [torch.arange, lambda rows: torch.ones(rows).cumsum(0)], ids=["arange", "cumsum"])
def test_loaded_networks_may_not_count_rows_either(count: Callable[[int], torch.Tensor], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_random({}, "mixtral", tmp_path))
    network = _network(tmp_path, "mixtral", "float32")

    assert len(find_kv_tensors(network, checkpoint, "float32")) == 8
    network.model.layers[3].register_forward_pre_hook(lambda _, args: (count(args[0].shape[1]), None)[1])
    with pytest.raises(ConfigError, match=r"mixtral: its layers count the rows of a step"):
        find_kv_tensors(network, checkpoint, "float32")


def test_the_tried_ones_are_those_of_every_test_run() -> None:
    assert set(NAMED) == {family.model_type for family in FAMILIES if family.is_tested}


@pytest.mark.parametrize("model_type", ["arcee", "llama"])
def test_only_untried_models_are_checked_at_load(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = list[str]()
    monkeypatch.setattr(row_check, "check_rows", lambda network, dtype: requests.append(network.config.model_type))
    path = make_family(model_type, tmp_path)

    load_model(path, dtype="float32", block_size=16, kv_cache_memory=1 << 20, num_threads=1).model.close()

    assert requests == ["arcee"] * (model_type == "arcee")
