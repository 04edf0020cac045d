"""The ops of torch_npu for all tests of this folder."""

import pytest
import torch

from engine.attention import npu_fused
from engine.quantization import kept_npu
from tests.npu import attention_ops, quantization_ops
from tests.npu.ops import NpuOps, require_npu_ops
from tests.npu.wheel import Wheel


@pytest.fixture
def npu_ops() -> NpuOps:
    """The registered ops, with an empty list of calls."""
    ops = require_npu_ops()
    ops.calls.clear()
    return ops


@pytest.fixture
def wheel(npu_ops: NpuOps) -> Wheel:
    """The unzipped wheel."""
    return npu_ops.wheel


@pytest.fixture
def attention_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fused attention take float32 for this test, in the engine and in its reference, and TND tiny head dims.

    No NPU does. Whole models are compared with the oracle in float32, where a wrong row shows at once.
    """
    monkeypatch.setattr(attention_ops.Dtypes, "also_float32", True)
    for name in ("DTYPES", "TND_DTYPES"):
        monkeypatch.setattr(npu_fused, name, (*getattr(npu_fused, name), torch.float32))
    monkeypatch.setattr(npu_fused, "TND_DIMS", range(npu_fused.TND_DIMS[-1] + 1))


@pytest.fixture
def kept_in_float32(attention_in_float32: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ops take float32 for this test, in the engine and in their references."""
    monkeypatch.setattr(quantization_ops.Dtypes, "also_float32", True)
    monkeypatch.setattr(kept_npu, "DTYPES", (*kept_npu.DTYPES, torch.float32))
