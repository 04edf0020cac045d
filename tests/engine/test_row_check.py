"""A model whose rows meet outside attention is found on its weights; those that the tests know are not asked."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import row_check
from engine.attention.registered import NAME, register
from engine.loader import load_model
from engine.row_check import TRIED, check_rows
from tests.engine.tiny_families import NAMED, make_family, save_random
from wire.errors import ConfigError


def _network(folder: Path, model_type: str, dtype: str, **settings: Any) -> Any:
    register()
    return AutoModelForCausalLM.from_pretrained(
        save_random(settings, model_type, folder), dtype=getattr(torch, dtype), attn_implementation=NAME
    ).eval()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_convolution_beside_attention_is_found(dtype: str, tmp_path: Path) -> None:
    network = _network(tmp_path, "lfm2", dtype, layer_types=["conv", "full_attention"] * 2)

    with pytest.raises(ConfigError, match=r"lfm2: logits differ .* keep a state beside attention"):
        check_rows(network, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "qwen3_moe", "afmoe"])
def test_what_meets_in_attention_alone_passes(model_type: str, dtype: str, tmp_path: Path) -> None:
    check_rows(_network(tmp_path, model_type, dtype), dtype)


def test_positions_counted_from_the_start_of_the_step_are_found(tmp_path: Path) -> None:
    network = _network(tmp_path, "gpt2", "float32")
    network.transformer.wpe.register_forward_pre_hook(
        lambda _, args: (torch.arange(args[0].shape[1])[None],)
    )  # fmt: skip

    with pytest.raises(ConfigError, match="gpt2: logits differ"):
        check_rows(network, "float32")


def test_the_tried_ones_are_those_of_every_test_run() -> None:
    assert set(NAMED) == TRIED


@pytest.mark.parametrize("model_type", ["arcee", "llama"])
def test_only_untried_ones_are_asked_at_load(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr(row_check, "check_rows", lambda network, dtype: asked.append(network.config.model_type))
    path = make_family(model_type, tmp_path)

    load_model(path, dtype="float32", block_size=16, kv_cache_memory=1 << 20, num_threads=1).model.close()

    assert asked == ["arcee"] * (model_type == "arcee")
