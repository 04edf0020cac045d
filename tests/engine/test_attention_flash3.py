"""FlashAttention 3 over blocks: the steps' arguments, its head dims, and what its kernel refuses."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.attention import flashinfer_paged
from engine.attention.cuda import CudaAttention, choose_libraries
from engine.attention.flash3_paged import Flash3Attention
from engine.attention.flashinfer_paged import FlashInferAttention
from engine.attention.interface import AttentionOptions
from tests.devices.fake_device import FakeDevice
from tests.engine import flash3_stand_in, flashinfer_stand_in
from tests.engine.attention_case import Shape, make_case
from tests.engine.flash3_stand_in import Refused, flash_attn_with_kvcache
from tests.engine.test_attention_cuda import Fixed, agree, fixed_inputs

_STEPS = {
    "decode": [(3, 1), (16, 1), (70, 1), (0, 1)],
    "mixed": [(9, 1), (0, 18), (33, 1), (20, 30), (1, 1)],
    "prompt": [(0, 37)],
}
_HALF = Shape(num_heads=8, num_kv_heads=2, key_dim=96, value_dim=96, dtype=torch.bfloat16, pool_dtype=torch.bfloat16)
_SINKS = torch.tensor([0.1, 2.0, -1.0, 0.5, 1.1, 3.0, 0.0, 1.5])


@pytest.fixture(autouse=True)
def no_call_is_made_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    flash3_stand_in.calls.clear()
    monkeypatch.setattr(flashinfer_paged, "WORKSPACE_BYTES", flashinfer_stand_in.MIN_WORKSPACE)


def with_flash3() -> CudaAttention:
    return CudaAttention([Flash3Attention(flash_attn_with_kvcache)])


@pytest.mark.combinations(2)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 20}, {"softcap": 2.0}, {"sinks": _SINKS}], ids=str)
@pytest.mark.parametrize("dim", [80, 96, 112, 128])
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("parts", _STEPS)
def test_a_step_is_one_call_whatever_its_sequences(
    parts: str, block_size: int, dim: int, options: dict[str, Any]
) -> None:
    shape = replace(_HALF, key_dim=dim, value_dim=dim, block_size=block_size)
    case, made = make_case(_STEPS[parts], shape), AttentionOptions(0.1, **options)

    agree(case.run(with_flash3(), made), case, made)

    (call,) = flash3_stand_in.calls
    assert call["max_seqlen_q"] == max(count for _, count in _STEPS[parts])
    assert call["window_size"] == (19 if "sliding_window" in options else -1, 0)


@pytest.mark.parametrize(
    "options", [AttentionOptions(0.1, 20), AttentionOptions(0.1, sinks=_SINKS)], ids=["window", "sinks"]
)
def test_fixed_steps_read_their_inputs_on_the_device(options: AttentionOptions) -> None:
    backend, case = with_flash3(), make_case(_STEPS["decode"], _HALF)
    fixed = Fixed(backend, case)

    agree(fixed.run(case, options), case, options)
    later = make_case([(start + 17, 1) for start, _ in _STEPS["decode"]], _HALF)
    inputs, _ = fixed_inputs(later, padded=2, width=9)
    for name in ("slots", "tables", "kv_lengths"):
        getattr(fixed._inputs, name).copy_(getattr(inputs, name))
    agree(fixed.run(later, options), later, options)

    assert fixed._decode.reads_tables
    assert [call["page_table"].shape for call in flash3_stand_in.calls] == [(6, 9)] * 2
    assert backend.table_widths(3, 3000, 16) == (85, 170, 340, 680, 1360, 2720, 3000)
    assert backend.fixed_bytes(4, 10) == 0


@pytest.mark.parametrize(
    "shape",
    [
        replace(_HALF, dtype=torch.float32, pool_dtype=torch.float32),
        replace(_HALF, key_dim=60, value_dim=60),
        replace(_HALF, key_dim=264, value_dim=264),
        replace(_HALF, value_dim=64),
    ],
    ids=["float32", "dim-60", "dim-264", "two-dims"],
)
def test_other_layers_go_to_torch(shape: Shape) -> None:
    backend, case, options = with_flash3(), make_case(_STEPS["mixed"], shape), AttentionOptions(0.1)

    agree(case.run(backend, options), case, options)

    assert flash3_stand_in.calls == []
    assert backend.table_widths(3, 3000, 16)[-1] == 1365


@pytest.mark.parametrize(("dim", "num_calls"), [(64, 0), (96, 1)])
def test_it_computes_what_flashinfer_does_not(dim: int, num_calls: int) -> None:
    flashinfer_stand_in._Wrapper.made.clear()
    flashinfer = FlashInferAttention(flashinfer_stand_in, FakeDevice())
    backend = CudaAttention([flashinfer, Flash3Attention(flash_attn_with_kvcache)])
    case, options = make_case(_STEPS["decode"], replace(_HALF, key_dim=dim, value_dim=dim)), AttentionOptions(0.1)
    fixed = Fixed(backend, case)

    agree(fixed.run(case, options), case, options)

    assert len(flash3_stand_in.calls) == num_calls
    assert len(flashinfer_stand_in._Wrapper.made) == 1 - num_calls
    assert fixed._decode.reads_tables == bool(num_calls)


@pytest.mark.parametrize(
    ("capability", "module", "note"),
    [
        ((9, 0), SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache), "attention by flash-attn-3 of "),
        ((8, 0), SimpleNamespace(), "attention by torch: flashinfer is not installed, torch is built"),
        ((9, 0), SimpleNamespace(), "attention by torch: flashinfer is not installed, flash-attn-3 cannot be used: "),
    ],
    ids=["hopper", "ampere", "another package"],
)
def test_the_package_is_for_one_generation_of_gpus(
    capability: tuple[int, int], module: Any, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.attention.cuda.find_flashinfer", lambda: (None, "flashinfer is not installed"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(module, "__spec__", SimpleNamespace(), raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)

    libraries, note_logged = choose_libraries(FakeDevice())

    assert [type(one) for one in libraries] == [Flash3Attention] * hasattr(module, "flash_attn_with_kvcache")
    assert note_logged.startswith(note)


def right_call() -> dict[str, Any]:
    """Return the arguments of a valid call: two sequences of three and one query."""
    pool = torch.zeros(6, 16, 2, 96, dtype=torch.bfloat16)
    return {
        "q": torch.zeros(4, 8, 96, dtype=torch.bfloat16), "k_cache": pool, "v_cache": pool.clone(), "max_seqlen_q": 3,
        "page_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), "causal": True,
        "cache_seqlens": torch.tensor([20, 5], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 3, 4], dtype=torch.int32),
    }  # fmt: skip


def _float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float()


def _long(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.long()


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", _float, "only supports fp16, bf16"),
        ("q", _strided, "contiguous last dimension"),
        ("q", lambda q: q[:3], "q must have shape"),
        ("q", lambda q: q[:, :7], "must divide number of heads"),
        ("q", lambda q: q[..., :95].contiguous(), "k must have shape"),
        ("k_cache", _float, "query and key must have the same dtype"),
        ("k_cache", lambda k: k.flatten(0, 1), "Number of heads|k must have shape"),
        ("v_cache", _float, "query and value must have the same dtype"),
        ("v_cache", lambda v: v[..., :64].contiguous(), "v must have shape"),
        ("page_table", _long, "page_table must have dtype"),
        ("page_table", _strided, "page_table must have contiguous"),
        ("page_table", lambda table: table[:1], "batch_size must be equal"),
        ("cache_seqlens", _long, "seqused_k must have dtype"),
        ("cache_seqlens", lambda lengths: lengths[:1], "seqused_k must have shape"),
        ("cu_seqlens_q", _long, "cu_seqlens_q must have dtype"),
        ("cu_seqlens_q", _strided, "cu_seqlens_q must be contiguous"),
        ("max_seqlen_q", lambda _: None, "max_seqlen_q must be provided"),
        ("max_seqlen_q", lambda _: 2, "would not be computed"),
    ],
)
def test_the_kernel_refuses_one_wrong_argument(name: str, change: Any, message: str) -> None:
    given = right_call()
    assert flash_attn_with_kvcache(**given).shape == (4, 8, 96)

    with pytest.raises(Refused, match=message):
        flash_attn_with_kvcache(**given | {name: change(given[name])})


@pytest.mark.parametrize(("dim", "message"), [(92, "multiple of 8"), (264, "at most 256")])
def test_the_kernel_refuses_other_head_dims(dim: int, message: str) -> None:
    pool = torch.zeros(6, 16, 2, dim, dtype=torch.bfloat16)

    with pytest.raises(Refused, match=message):
        flash_attn_with_kvcache(**right_call() | {"q": pool[0, :4].repeat(1, 4, 1), "k_cache": pool, "v_cache": pool})
