"""Static W8A8 on an NPU: the calls of vLLM Ascend, by its ops' references, equal plain whole numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from devices.npu import TRAITS
from engine.oracle import Oracle
from engine.quantization.kept import KeptLinear, KeptWeight, kept_weight
from engine.quantization.kept_check import disagreement
from engine.quantization.kept_npu import STATIC_W8A8
from engine.quantization.kept_static import STATIC_BY_TORCH, StaticFormat
from tests.engine.plain_static import compute_statically, rows_of, static_layer
from tests.engine.rank_logits import rank_logits
from tests.engine.tiny_families import make_family
from tests.engine.tiny_quantised import modelslim, quantise_checkpoint
from tests.npu.ops import NpuOps
from tests.npu.rules import Refused

_FORM = StaticFormat(STATIC_W8A8)
_CALLS = ["npu_quantize", "npu_quant_matmul"]

pytestmark = pytest.mark.usefixtures("npu_ops")


@pytest.mark.parametrize("is_first_rank", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_static_w8a8_products_are_those_of_plain_whole_numbers(
    dtype: torch.dtype, is_first_rank: bool, npu_ops: NpuOps
) -> None:
    grouped, plain = static_layer(24, 96)
    assert grouped.static is not None
    if not is_first_rank:
        grouped = replace(grouped, static=replace(grouped.static, bias=None))
        plain = replace(plain, quant_bias=np.zeros(24, np.int32))
    rows, weight = rows_of(5, 96, dtype), kept_weight(grouped, rounded_inputs=torch.int8)
    assert isinstance(weight, KeptWeight)

    kept = KeptLinear(nn.Linear(96, 24, bias=False), _FORM.pack(weight, dtype), None)
    got = kept.product(rows)

    assert got.dtype == dtype
    assert np.allclose(got.double().numpy(), plain.outputs(rows), rtol=float(torch.finfo(dtype).eps), atol=0)
    assert npu_ops.names() == _CALLS
    assert torch.equal(got, StaticFormat(STATIC_BY_TORCH).pack(weight, dtype)(rows))
    assert disagreement(kept, grouped, weight, _FORM, dtype) is None


@pytest.mark.parametrize(
    ("said", "changed"),
    [
        ("scales is torch.float32", {"scales": torch.ones(1)}),
        ("zero_points is torch.int8", {"zero_points": torch.ones(1, dtype=torch.int8)}),
        (r"scales is \[2\]", {"scales": torch.ones(2, dtype=torch.bfloat16)}),
        ("x is torch.float32", {"x": torch.ones(3, 32)}),
        ("no reference for div_mode", {"div_mode": True}),
    ],
)
def test_a_rounding_forbidden_by_the_documents_is_refused(said: str, changed: dict[str, Any]) -> None:
    one = torch.ones(1, dtype=torch.bfloat16)
    right: dict[str, Any] = {
        "x": torch.ones(3, 32, dtype=torch.bfloat16), "scales": one, "zero_points": one, "dtype": torch.qint8,
        "axis": -1, "div_mode": False,
    }  # fmt: skip
    assert torch.ops.npu.npu_quantize(*right.values()).dtype == torch.int8

    with pytest.raises((Refused, RuntimeError), match=said):
        torch.ops.npu.npu_quantize(*(right | changed).values())


@pytest.mark.usefixtures("kept_in_float32")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_static_w8a8_has_the_logits_of_plain_whole_numbers(num_ranks: int, tmp_path: Path, npu_ops: NpuOps) -> None:
    path = make_family("llama", tmp_path, intermediate_size=192)
    quantise_checkpoint(modelslim("W8A8"), path)
    token_ids = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(5))
    oracle = Oracle(path, "float32")
    compute_statically(oracle._network, path)
    with torch.inference_mode():
        expected = oracle._network(input_ids=token_ids, use_cache=False).logits
    by_host, *_ = rank_logits(path, num_ranks, token_ids, formats=("int8-static",))
    npu_ops.calls.clear()

    own, *_ = rank_logits(path, num_ranks, token_ids, formats=TRAITS.kept_linears)

    assert set(npu_ops.names()) == set(_CALLS)
    assert (own - expected).norm() < 0.01 * expected.norm()
    torch.testing.assert_close(own, by_host, rtol=1e-4, atol=1e-4)
