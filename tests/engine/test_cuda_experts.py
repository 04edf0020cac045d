"""Experts in groups by torch's grouped product, as on a GPU: tokens equal transformers', exceptions are reported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, MixtralConfig

from engine.attention.registered import NAME, register
from engine.cuda import experts
from engine.cuda.experts import TorchGrouped
from engine.loader import LoadedModel
from engine.oracle import Oracle
from tests.engine.step_runner import generate
from tests.engine.test_cuda_modules import load
from tests.engine.tiny_families import make_family

_PROMPTS = [[5, 9, 200, 31, 7], list(range(40, 75))]
_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


class Calls:
    """Wraps grouped_mm: counts calls, and refuses what CUDA's kernel refuses."""

    def __init__(self) -> None:
        self.count = 0
        self._real = functional.grouped_mm

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        self.count += 1
        assert offs.dtype == torch.int32
        assert int(offs[-1]) == len(rows)
        assert rows.is_contiguous()
        for tensor in (rows, weight):
            sizes = [stride * tensor.itemsize for stride in tensor.stride() if stride != 1]
            assert 1 in tensor.stride()[-2:]
            assert all(size % 16 == 0 for size in sizes), f"strides of {sizes} bytes"
        return self._real(rows, weight, offs=offs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    monkeypatch.setattr(functional, "grouped_mm", made)
    return made


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the groups be of float32: whole models are compared with the oracle in it."""
    monkeypatch.setattr(experts, "DTYPES", (torch.bfloat16, torch.float32))


def tokens(loaded: LoadedModel) -> list[list[int]]:
    return generate(loaded.model, _PROMPTS, 12, chunk=16)


def small_network(dtype: torch.dtype, **sizes: Any) -> Any:
    register()
    torch.manual_seed(3)
    config = MixtralConfig(**(_SIZES | {"intermediate_size": 96} | sizes))
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME).eval()


@pytest.mark.often("gpt_oss", "qwen2_moe")
@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_greedy_output_is_that_of_transformers(family: str, tmp_path: Path, calls: Calls) -> None:
    path = make_family(family, tmp_path / family)
    loaded = load(path)
    calls.count = 0

    got = tokens(loaded)

    assert any(note.startswith("by torch: the experts of ") for note in loaded.notes)
    assert calls.count > 0
    assert got == Oracle(path, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)


def test_a_layer_in_bfloat16_is_two_calls(calls: Calls) -> None:
    network = small_network(torch.bfloat16)

    (line,) = experts.use_grouped_experts(network)
    calls.count = 0
    with torch.inference_mode():
        layer = network.model.layers[0].mlp.experts
        layer(torch.randn(7, 64).bfloat16(), torch.zeros(7, 2, dtype=torch.int64), torch.ones(7, 2).bfloat16())

    assert line == "by torch: the experts of 1 layer"
    assert calls.count == 2


@pytest.mark.parametrize(
    ("dtype", "width", "reason", "way"),
    [
        (torch.float16, 96, "experts of torch.float16: grouped_mm multiplies only bfloat16 in one call", "grouped_mm"),
        (torch.bfloat16, 100, "experts with 100 columns: grouped_mm requires rows of a multiple of 16 bytes", "eager"),
    ],
)
def test_unsupported_experts_are_left_unchanged(dtype: torch.dtype, width: int, reason: str, way: str) -> None:
    """The implementation that transformers chose is kept, or one expert after the other where that does not run."""
    network = small_network(dtype, intermediate_size=width)

    assert experts.use_grouped_experts(network) == (f"experts unchanged: {reason}",)

    assert network.get_experts_implementation()[""] == way


@pytest.mark.usefixtures("in_float32")
def test_experts_that_differ_in_groups_run_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_family("mixtral", tmp_path / "mixtral")
    right = TorchGrouped.multiply
    monkeypatch.setattr(TorchGrouped, "multiply", lambda *given: right(*given).roll(1, 0))

    loaded = load(path)

    assert any(note.startswith("experts unchanged: the grouped result differs by ") for note in loaded.notes)
    assert tokens(loaded) == Oracle(path, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)


def test_experts_run_one_by_one_if_nothing_else_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("grouped_mm is not compiled for this device")

    network = small_network(torch.bfloat16)
    assert network.get_experts_implementation()[""] == "grouped_mm"
    monkeypatch.setattr(functional, "grouped_mm", fail)

    (line,) = experts.use_grouped_experts(network)

    assert line.startswith("experts unchanged: the grouped call failed: grouped_mm is not compiled")
    assert network.get_experts_implementation()[""] == "eager"
