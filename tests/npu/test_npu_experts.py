"""Experts in groups by npu_grouped_matmul: families with experts equal transformers, and unsupported ones fall back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loader import LoadedModel, load_model
from engine.npu import experts
from engine.oracle import Oracle
from engine.quantization import kept_npu_experts
from engine.quantization.kept_experts import KeptExperts
from tests.engine.rank_logits import load_rank, rank_logits
from tests.engine.step_runner import generate
from tests.engine.tiny_families import make_family
from tests.engine.tiny_quantised import Scheme, gptq, hf_fp8, modelslim, quantise_checkpoint, w8a8
from tests.npu import quantization_ops
from tests.npu.npu_on_cpu import NpuOnCpu
from tests.npu.ops import NpuOps
from tests.npu.rules import Refused
from wire.kv_layout import Rank

_PROMPTS = [[5, 9, 200, 31, 7], list(range(40, 75))]
_OP = "npu_grouped_matmul"

pytestmark = pytest.mark.usefixtures("npu_ops", "attention_in_float32")


def _load(path: Path) -> LoadedModel:
    return load_model(
        path, dtype="float32", block_size=128, kv_cache_memory=4 << 20, num_threads=1, device=NpuOnCpu()
    )  # fmt: skip


@pytest.mark.often("gpt_oss", "qwen3_moe")
@pytest.mark.parametrize(
    "family", ["mixtral", pytest.param("qwen2_moe", marks=pytest.mark.long), "qwen3_moe", "gpt_oss"]
)
def test_greedy_output_equals_transformers(family: str, tmp_path: Path, npu_ops: NpuOps) -> None:
    """gpt_oss has experts with biases, stored transposed, and its own gate."""
    path = make_family(family, tmp_path / family)

    loaded = _load(path)
    npu_ops.calls.clear()
    got = generate(loaded.model, _PROMPTS, 12, chunk=16)

    assert any(note.startswith("by NPU ops: the experts of ") for note in loaded.notes)
    assert _OP in npu_ops.names()
    assert got == Oracle(path, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)


def test_experts_with_wrong_grouped_results_run_as_before(
    tmp_path: Path, npu_ops: NpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_family("mixtral", tmp_path / "mixtral")
    right = experts.NpuGrouped.multiply
    monkeypatch.setattr(experts.NpuGrouped, "multiply", lambda *given: right(*given).roll(1, 0))

    loaded = _load(path)
    npu_ops.calls.clear()
    got = generate(loaded.model, _PROMPTS, 12, chunk=16)

    assert any(note.startswith("experts unchanged: the grouped result differs by ") for note in loaded.notes)
    assert _OP not in npu_ops.names()
    assert got == Oracle(path, "float32").generate_greedy(_PROMPTS, 12, ignore_eos=True)


def test_a_refused_call_leaves_experts_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_BY_ROWS", -1)

    loaded = _load(make_family("mixtral", tmp_path / "mixtral"))

    (note,) = (note for note in loaded.notes if "experts" in note)
    assert note.startswith("experts unchanged: the grouped call failed: ")


@pytest.mark.combinations(1)
@pytest.mark.parametrize("scheme", [w8a8("channel"), modelslim("W8A8_DYNAMIC")], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_experts_in_w8a8_are_multiplied_by_their_codes(
    scheme: Scheme, num_ranks: int, tmp_path: Path, npu_ops: NpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32, which no NPU has, shows only the rounding of inputs: a step of 127 of their largest.

    The median over tokens counts: rounding may route one to other experts.
    """
    monkeypatch.setattr(quantization_ops.Dtypes, "also_float32", True)
    monkeypatch.setitem(kept_npu_experts.SCALES, torch.float32, torch.float32)
    path = make_family("mixtral", tmp_path / "mixtral", num_hidden_layers=2)
    quantise_checkpoint(replace(scheme, ignore=("lm_head", "gate")), path)
    token_ids = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(5))
    expected, *_ = rank_logits(path, num_ranks, token_ids)
    npu_ops.calls.clear()

    own, *_ = rank_logits(path, num_ranks, token_ids, formats=("npu-experts-int8",))

    assert {"npu_dynamic_quant", _OP} <= set(npu_ops.names())
    far = (own - expected).norm(dim=-1) / expected.norm(dim=-1)  # [1, num_tokens]
    assert 0 < far.median() < 0.05
    network = load_rank(path, Rank(0, num_ranks), lambda _: None, formats=("npu-experts-int8",))
    held = [module.num_bytes for module in network.modules() if isinstance(module, KeptExperts)]
    inner = 96 // num_ranks
    assert sum(held) == 2 * 4 * (3 * 64 * inner + (2 * inner + 64) * 4)


@pytest.mark.often("bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_with_w8a8_experts_is_served_in_the_dtypes_of_npus(dtype: str, tmp_path: Path, npu_ops: NpuOps) -> None:
    path = make_family("mixtral", tmp_path / "mixtral", num_hidden_layers=2)
    quantise_checkpoint(replace(w8a8("channel"), ignore=("lm_head", "gate")), path)

    loaded = load_model(
        path, dtype=dtype, block_size=128, kv_cache_memory=4 << 20, num_threads=1, device=NpuOnCpu()
    )  # fmt: skip
    npu_ops.calls.clear()
    got = generate(loaded.model, _PROMPTS[:1], 3, chunk=16)

    assert any(", kept: 32 of 32 quantised layers; " in note for note in loaded.notes)
    assert _OP in npu_ops.names()
    assert [len(tokens) for tokens in got] == [3]


@pytest.mark.parametrize(
    ("kind", "scheme", "words"),
    [
        ("llama", hf_fp8((32, 32)), "dequantised to bfloat16 at load, as there is no kernel for float8_e4m3fn codes"),
        (
            "mixtral", replace(gptq(4, 32, act_order=True), ignore=("lm_head", "gate")),
            "; 24 dequantised to bfloat16: experts in act order have no kernel",
        ),
    ],
    ids=["float8 by block", "experts in act order"],
)  # fmt: skip
def test_the_line_at_load_says_what_npus_dequantise(kind: str, scheme: Scheme, words: str, tmp_path: Path) -> None:
    path = make_family(kind, tmp_path / kind, num_hidden_layers=2)
    quantise_checkpoint(scheme, path)

    notes = load_model(
        path, dtype="bfloat16", block_size=128, kv_cache_memory=4 << 20, num_threads=1, device=NpuOnCpu()
    ).notes  # fmt: skip

    assert any(words in note for note in notes), notes


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("group_type 2|group_type only", {"group_type": 1}),
        ("split_item 0", {"split_item": 0}),
        ("group_list is torch.int32", {"group_list": torch.tensor([1, 4], dtype=torch.int32)}),
        ("group_list ends at", {"group_list": torch.tensor([1, 3])}),
        ("group_list ends at", {"group_list": torch.tensor([4, 1])}),
        ("group_list ends at", {"group_list_type": 1}),
        (r"group_list is \[3\]", {"group_list": torch.tensor([1, 2, 4])}),
        ("x is not contiguous", {"x": [torch.ones(8, 4).t()]}),
        ("weight is torch.float16", {"weight": [torch.ones(2, 8, 6).half()]}),
        (r"x is \[4, 7\]", {"x": [torch.ones(4, 7)]}),
    ],
)
def test_a_call_forbidden_by_the_documents_is_refused(message: str, changed: dict[str, Any]) -> None:
    right: dict[str, Any] = {
        "x": [torch.ones(4, 8)], "weight": [torch.ones(2, 8, 6)], "group_list": torch.tensor([1, 4]), "split_item": 3,
        "group_type": 0, "group_list_type": 0,
    }  # fmt: skip
    assert _grouped_matmul(**right)[0].shape == (4, 6)

    with pytest.raises((Refused, RuntimeError), match=message):
        _grouped_matmul(**right | changed)


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("scale is torch.float32", {"scale": [torch.ones(2, 6)]}),
        (r"scale is \[6\]", {"scale": [torch.ones(6, dtype=torch.bfloat16)]}),
        (r"per_token_scale is \[4, 1\]", {"per_token_scale": [torch.ones(4, 1)]}),
        ("per_token_scale is torch.bfloat16", {"per_token_scale": [torch.ones(4, dtype=torch.bfloat16)]}),
        ("output_dtype", {"output_dtype": torch.float32}),
        ("weight is torch.float32", {"weight": [torch.ones(2, 8, 6)]}),
    ],
)
def test_a_call_in_int8_forbidden_by_the_documents_is_refused(message: str, changed: dict[str, Any]) -> None:
    right: dict[str, Any] = {
        "x": [torch.ones(4, 8, dtype=torch.int8)], "weight": [torch.ones(2, 8, 6, dtype=torch.int8)],
        "group_list": torch.tensor([1, 4]), "split_item": 3, "group_type": 0, "group_list_type": 0,
        "scale": [torch.ones(2, 6, dtype=torch.bfloat16)], "per_token_scale": [torch.ones(4)],
        "output_dtype": torch.bfloat16,
    }  # fmt: skip
    assert torch.equal(_grouped_matmul(**right)[0], torch.full((4, 6), 8, dtype=torch.bfloat16))

    with pytest.raises((Refused, RuntimeError), match=message):
        _grouped_matmul(**right | changed)


def _grouped_matmul(x: Any, weight: Any, **named: Any) -> Any:
    return torch.ops.npu.npu_grouped_matmul(x, weight, **named)
