"""The arguments of paged attention that a layer may use, and what the KV probe refuses."""

from typing import Any

import pytest
import torch

from engine.attention.interface import AttentionOptions
from engine.attention.registered import _attention, attach
from engine.kv_probe import KvProbe
from wire.errors import ConfigError


class _Layer(torch.nn.Module):
    """An attention module as transformers' are: it knows its number."""

    def __init__(self, layer_idx: int | None) -> None:
        super().__init__()
        self.layer_idx = layer_idx


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[int, AttentionOptions]] = []

    def run_layer(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        self.calls.append((layer, options))
        return query.transpose(0, 1)


def _call(module: torch.nn.Module, mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    query, key = torch.ones(1, 4, 3, 16), torch.ones(1, 2, 3, 16)
    return _attention(module, query, key, key, mask, **kwargs)[0]


def test_a_layers_arguments_reach_the_handler() -> None:
    layer, recorder = _Layer(5), _Recorder()
    attach(layer, recorder)

    output = _call(layer, scaling=0.5, sliding_window=9, softcap=2.0, dropout=0.0, position_ids=torch.zeros(1, 3))

    assert output.shape == (1, 3, 4, 16)
    assert recorder.calls == [(5, AttentionOptions(0.5, 9, 2.0, None))]


def test_scaling_follows_the_head_size_if_the_layer_gives_none() -> None:
    layer, recorder = _Layer(0), _Recorder()
    attach(layer, recorder)

    _call(layer)

    assert recorder.calls[0][1].scaling == 0.25


def test_unsupported_attention_is_refused_by_name() -> None:
    layer = _Layer(0)
    attach(layer, _Recorder())

    with pytest.raises(ConfigError, match="_Layer passes position_bias to its attention"):
        _call(layer, position_bias=torch.zeros(1))
    with pytest.raises(ConfigError, match="both directions"):
        _call(layer, is_causal=False)
    with pytest.raises(ConfigError, match="own mask"):
        _call(layer, torch.zeros(1, 1, 3, 3))


def test_a_layer_without_a_number_is_refused() -> None:
    layer = _Layer(None)
    attach(layer, _Recorder())

    with pytest.raises(ConfigError, match="no layer index"):
        _call(layer)


def test_the_probe_records_heads_and_dims_of_every_layer() -> None:
    probe = KvProbe("float32")
    query, key, value = torch.ones(4, 1, 8), torch.ones(2, 1, 8), torch.full((2, 1, 6), 3.0)

    output = probe.run_layer(0, query, key, value, AttentionOptions(1.0))

    assert output.shape == (1, 4, 6)
    assert [(tensor.name, tensor.heads, tensor.head_dim) for tensor in probe.tensors(1)] == [("k", 2, 8), ("v", 2, 6)]


def test_a_layer_that_keeps_its_state_elsewhere_is_refused() -> None:
    probe, x = KvProbe("float32"), torch.ones(2, 1, 8)
    probe.run_layer(0, x, x, x, AttentionOptions(1.0))

    with pytest.raises(ConfigError, match="1 of the model's 2 layers"):
        probe.tensors(2)


def test_a_layer_that_attends_twice_is_refused() -> None:
    probe, x = KvProbe("float32"), torch.ones(2, 1, 8)
    probe.run_layer(0, x, x, x, AttentionOptions(1.0))

    with pytest.raises(ConfigError, match="layer 0 attends twice"):
        probe.run_layer(0, x, x, x, AttentionOptions(1.0))
