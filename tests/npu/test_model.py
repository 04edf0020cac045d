"""Whole models on the NPU path: tokens equal transformers', and every op call is checked."""

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention import npu_fused
from engine.checkpoints.default_model import ensure_default_model
from engine.loader import load_model
from engine.oracle import Oracle
from engine.step import BatchSequence, SampleRow, StepBatch
from engine.torch_model import TorchModel
from pdserve.run_folder import default_cache_dir
from tests.engine.step_runner import generate
from tests.engine.tiny_families import make_family
from tests.engine.tiny_models import DISTINCT_KINDS, VOCAB_SIZE, make_tiny_model
from tests.npu.npu_on_cpu import NpuOnCpu
from tests.npu.ops import NpuOps
from wire.types import SamplingParams

_FIA, _FIA2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"
_SMALL_OPS = ("npu_scatter_pa_kv_cache", "npu_rms_norm", "npu_add_rms_norm", "npu_swiglu")


def load(path: Path, dtype: str = "float32", attention: str = "auto", memory: int = 8 << 20) -> TorchModel:
    return load_model(
        path, dtype=dtype, block_size=128, kv_cache_memory=memory, num_threads=1, device=NpuOnCpu(1),
        attention_backend=attention,
    ).model  # fmt: skip


def prompts(*lengths: int) -> list[list[int]]:
    numbers = random.Random(11)
    return [[numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(length)] for length in lengths]


@pytest.mark.often("mistral-sliding", "opt")
@pytest.mark.usefixtures("attention_in_float32")
@pytest.mark.parametrize("kind", DISTINCT_KINDS)
def test_greedy_output_equals_transformers(npu_ops: NpuOps, kind: str, tmp_path: Path) -> None:
    path, given = make_tiny_model(kind, tmp_path / kind), prompts(1, 17, 150)

    model = load(path)
    npu_ops.calls.clear()
    got = generate(model, given, 16, chunk=61)

    assert got == Oracle(path, "float32").generate_greedy(given, 16, ignore_eos=True)
    assert model.info.device == "npu:1"
    calls = Counter(npu_ops.names())
    assert calls["npu_scatter_pa_kv_cache"] > 0
    assert calls[_FIA] >= calls["npu_scatter_pa_kv_cache"]
    model.close()


def test_float32_attention_runs_in_torch(npu_ops: NpuOps, tmp_path: Path) -> None:
    path, given = make_tiny_model("llama", tmp_path / "llama"), prompts(3, 40)

    model = load(path)
    got = generate(model, given, 8, chunk=33)

    assert got == Oracle(path, "float32").generate_greedy(given, 8, ignore_eos=True)
    assert _FIA not in npu_ops.names()
    model.close()


def test_bfloat16_differs_from_reference_attention_by_rounding_only(npu_ops: NpuOps, tmp_path: Path) -> None:
    path, given = make_tiny_model("qwen3", tmp_path / "qwen3"), prompts(150)[0]
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    batch = StepBatch(
        tuple(given), (BatchSequence(0, 150, (1, 0)),), tuple(SampleRow(row, greedy, 0, row) for row in range(150))
    )

    ours, reference = load(path, "bfloat16"), load(path, "bfloat16", "reference")
    npu_ops.calls.clear()
    got, expected = (model.logits(batch).float() for model in (ours, reference))

    assert _FIA in npu_ops.names()
    assert float((got - expected).norm() / expected.norm()) < 2e-2
    ours.close()
    reference.close()


@pytest.mark.usefixtures("attention_in_float32")
@pytest.mark.parametrize(("make", "kind", "op"), [(make_tiny_model, "llama", _FIA), (make_family, "gpt_oss", _FIA2)])
def test_bsh_computes_models_whose_blocks_tnd_refuses(
    npu_ops: NpuOps, make: Callable[[str, Path], Path], kind: str, op: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path, given, real = make(kind, tmp_path / kind), prompts(5, 150), getattr(torch.ops.npu, op)

    def refuse_blocks(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_layout"] == "TND" and kwargs["block_table"] is not None:
            raise RuntimeError("When layout is TND, not support Page Attention")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.ops.npu, op, refuse_blocks)
    loaded = load_model(
        path, dtype="float32", block_size=128, kv_cache_memory=8 << 20, num_threads=1, device=NpuOnCpu()
    )
    npu_ops.calls.clear()
    got = generate(loaded.model, given, 8, chunk=61)

    assert got == Oracle(path, "float32").generate_greedy(given, 8, ignore_eos=True)
    assert {call.kwargs["input_layout"] for call in npu_ops.calls if call.name in (_FIA, _FIA2)} == {"BSH"}
    (note,) = [note for note in loaded.notes if "because 'npu'" in note]
    assert note.startswith(f"attention by {_FIA}, layout BSH only, because 'npu' fails its check")
    assert note.endswith("RuntimeError: When layout is TND, not support Page Attention")
    loaded.model.close()


@pytest.mark.usefixtures("attention_in_float32")
def test_torch_computes_windows_where_masks_end_at_a_key(
    npu_ops: NpuOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in vllm-project/vllm-ascend issue 15503: single rows under BSH, keys after the 512th."""
    path, given = make_family("gemma3_text", tmp_path / "gemma"), prompts(5, 150)
    real = getattr(torch.ops.npu, _FIA)
    monkeypatch.setattr(npu_fused, "TND_DIMS", ())

    def ignore(*args: Any, **kwargs: Any) -> Any:
        if kwargs["atten_mask"] is not None and "sparse_mode" not in kwargs:
            kwargs["atten_mask"][..., 512:] = False
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.ops.npu, _FIA, ignore)
    loaded = load_model(
        path, dtype="float32", block_size=128, kv_cache_memory=8 << 20, num_threads=1, device=NpuOnCpu()
    )
    npu_ops.calls.clear()
    got = generate(loaded.model, given, 8, chunk=61)

    assert got == Oracle(path, "float32").generate_greedy(given, 8, ignore_eos=True)
    (note,) = [note for note in loaded.notes if "because 'npu'" in note]
    assert note.startswith(f"attention by {_FIA}, layout BSH only, windows by torch, because ")
    assert "window 12: largest difference" in note
    assert {call.kwargs["atten_mask"] is None for call in npu_ops.calls if call.name == _FIA} == {True, False}
    loaded.model.close()


def test_the_reference_is_used_where_both_layouts_fail(
    npu_ops: NpuOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = make_tiny_model("llama", tmp_path / "llama"), getattr(torch.ops.npu, _FIA)
    monkeypatch.setattr(torch.ops.npu, _FIA, lambda *args, **kwargs: (real(*args, **kwargs)[0] * 1.1,))

    loaded = load_model(
        path, dtype="bfloat16", block_size=128, kv_cache_memory=8 << 20, num_threads=1, device=NpuOnCpu()
    )
    npu_ops.calls.clear()
    generate(loaded.model, prompts(5), 3, chunk=61)

    assert not {_FIA, "npu_scatter_pa_kv_cache"} & set(npu_ops.names())
    assert [note for note in loaded.notes if note.startswith("attention by the reference, because 'npu' fails")]
    loaded.model.close()


@pytest.mark.long
@pytest.mark.usefixtures("attention_in_float32")
def test_the_default_model_equals_transformers(npu_ops: NpuOps) -> None:
    path, given = ensure_default_model(default_cache_dir(os.environ), lambda _: None), prompts(9, 200)

    model = load(path, memory=64 << 20)
    got = generate(model, given, 16, chunk=96)

    assert got == Oracle(path, "float32").generate_greedy(given, 16, ignore_eos=True)
    called = set(npu_ops.names())
    assert called == {_FIA, *_SMALL_OPS, "npu_apply_rotary_pos_emb"}
    model.close()
