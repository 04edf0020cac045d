"""The ops of torch_npu for all tests of this folder."""

import pytest

from tests.npu import attention_ops
from tests.npu.ops import NpuOps, require_npu_ops
from tests.npu.wheel import Wheel


@pytest.fixture
def npu_ops() -> NpuOps:
    """The registered ops, with no call in their log."""
    ops = require_npu_ops()
    ops.calls.clear()
    return ops


@pytest.fixture
def wheel(npu_ops: NpuOps) -> Wheel:
    """The unzipped wheel."""
    return npu_ops.wheel


@pytest.fixture
def attention_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fused attention take float32 for this test: whole models are compared with the oracle in it."""
    monkeypatch.setattr(attention_ops.Dtypes, "also_float32", True)
