"""Weights laid out for the CPU: the same results, the same modules, and only where both are sure to agree."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine.linear_layout import PackedLinear, lay_out
from tests.engine.tiny_models import KINDS, VOCAB_SIZE, make_tiny_model


def _network(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()


@pytest.mark.combinations(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 8, 40])
def test_logits_stay_the_same_up_to_rounding(kind: str, num_tokens: int, tmp_path: Path) -> None:
    path = make_tiny_model(kind, tmp_path)
    tokens = torch.randint(0, VOCAB_SIZE, (1, num_tokens), generator=torch.Generator().manual_seed(1))
    plain, laid_out = _network(path), _network(path)

    lay_out(laid_out)

    with torch.inference_mode():
        torch.testing.assert_close(laid_out(tokens).logits, plain(tokens).logits, rtol=1e-4, atol=1e-4)


def test_inner_weights_are_column_major_and_keep_their_shape(tmp_path: Path) -> None:
    network = _network(make_tiny_model("llama", tmp_path))

    lay_out(network)

    weight = network.model.layers[0].mlp.up_proj.weight
    assert tuple(weight.shape) == (96, 64)
    assert weight.t().is_contiguous()
    assert network.get_input_embeddings().weight.is_contiguous()
    assert isinstance(network.get_output_embeddings(), PackedLinear)


def test_a_packed_layer_that_disagrees_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = _network(make_tiny_model("llama", tmp_path))
    monkeypatch.setattr(PackedLinear, "forward", lambda packed, rows: torch.zeros(*rows.shape[:-1], VOCAB_SIZE))

    lay_out(network)

    assert type(network.get_output_embeddings()) is nn.Linear


def test_other_dtypes_stay_as_they_are(tmp_path: Path) -> None:
    network = _network(make_tiny_model("llama", tmp_path), torch.bfloat16)

    lay_out(network)

    assert network.model.layers[0].mlp.up_proj.weight.is_contiguous()
    assert type(network.get_output_embeddings()) is nn.Linear


def test_a_bias_is_added(tmp_path: Path) -> None:
    linear = nn.Linear(16, 32).eval()
    rows = torch.randn(3, 16, generator=torch.Generator().manual_seed(2))

    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(rows), linear(rows), rtol=1e-4, atol=1e-4)
