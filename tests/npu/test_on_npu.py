"""Tests that need an NPU: each op against its CPU reference, captured steps, and whole models.

Skipped where torch_npu sees none, which has been everywhere so far. Where it does, the other tests of this folder are
skipped: their ops would replace the real ones.

    python -m pytest tests/npu/test_on_npu.py
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from devices.npu import NpuDevice, NpuKind
from engine.attention.npu import NpuAttention
from engine.attention.probe import LayerKind, differs, usual_parts
from engine.loader import load_model
from tests.engine.step_runner import generate
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model
from tests.npu.ops import REFERENCES
from tests.npu.right_calls import RIGHT_CALLS

_LACKING = NpuKind().lacking()
if _LACKING is not None:
    pytest.skip(f"{_LACKING}: every test of this file needs an NPU", allow_module_level=True)


@pytest.fixture(scope="module")
def npu() -> NpuDevice:
    device = NpuKind().open()
    device.activate()
    return device


@pytest.mark.parametrize("op", RIGHT_CALLS)
def test_an_op_equals_its_reference(npu: NpuDevice, op: str) -> None:
    torch.manual_seed(2)
    args, kwargs = RIGHT_CALLS[op](torch.randn)
    there = _to_device((args, kwargs), npu.torch_device)

    expected, got = REFERENCES[op](*args, **kwargs), getattr(torch.ops.npu, op)(*there[0], **there[1])

    changed = list(zip(args, there[0], strict=True)) if expected is None else zip(expected, got, strict=False)
    for wanted, made in changed:
        if isinstance(wanted, torch.Tensor) and wanted.numel():
            torch.testing.assert_close(made.cpu().float(), wanted.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("uses_tnd", [True, False], ids=["TND", "BSH"])
@pytest.mark.parametrize("window", [None, 20, 200])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_equals_its_reference(
    npu: NpuDevice, dim: int, window: int | None, has_sinks: bool, uses_tnd: bool
) -> None:
    kind = LayerKind(8, 2, dim, dim, dim**-0.5, window, None, has_sinks)

    assert (
        differs(
            NpuAttention(uses_tnd=uses_tnd), kind, usual_parts(128), block_size=128, dtype=torch.bfloat16,
            device=npu.torch_device,
        )
        is None
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral-sliding"])
def test_graphs_change_no_token(npu: NpuDevice, kind: str, tmp_path: Path) -> None:
    path, numbers = make_tiny_model(kind, tmp_path / kind), random.Random(5)
    prompts = [[numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(length)] for length in (5, 120, 30)]

    made: list[Any] = []
    for rows in (0, 4):
        loaded = load_model(
            path, dtype="bfloat16", block_size=128, kv_cache_memory=64 << 20, num_threads=1, device=npu,
            max_graph_rows=rows,
        )  # fmt: skip
        assert not [note for note in loaded.notes if "because" in note]
        made.append(generate(loaded.model, prompts, 20, chunk=200))
        loaded.model.close()

    assert made[0] == made[1]


def _to_device(values: Any, device: torch.device) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.clone().to(device), values)
