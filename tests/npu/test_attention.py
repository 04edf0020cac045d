"""The NPU backend against dense attention, over CPU references of torch_npu's ops."""

from dataclasses import replace

import pytest
import torch

from engine.attention.block_tables import DecodeInputs, read_tables
from engine.attention.interface import AttentionBackend, AttentionOptions
from engine.attention.npu import NpuAttention
from tests.engine.attention_case import Case, Shape, make_case
from tests.npu.ops import NpuOps

_FIA, _FIA2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"
_BATCHES = {
    "prefill": [(0, 37)],
    "chunk": [(130, 21)],
    "two-prefills": [(0, 5), (0, 133)],
    "decode": [(40, 1)],
    "decode-batch": [(3, 1), (127, 1), (128, 1), (270, 1), (0, 1)],
    "mixed": [(9, 1), (0, 18), (333, 1), (120, 30), (1, 1)],
}
_BF16 = Shape(
    key_dim=64, value_dim=64, block_size=128, dtype=torch.bfloat16, pool_dtype=torch.bfloat16
)  # fmt: skip
_PLAIN = AttentionOptions(0.125)
pytestmark = pytest.mark.usefixtures("npu_ops")


def check(case: Case, options: AttentionOptions, backend: AttentionBackend | None = None) -> None:
    got = case.run(backend or NpuAttention(), options)

    assert got.dtype == case.shape.dtype
    torch.testing.assert_close(got.float(), case.expected(options), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("batch", _BATCHES)
def test_a_plain_layer_is_one_call_for_all_rows(npu_ops: NpuOps, batch: str) -> None:
    check(make_case(_BATCHES[batch], _BF16), _PLAIN)

    assert npu_ops.names() == ["npu_scatter_pa_kv_cache", _FIA]
    call = npu_ops.calls[-1].kwargs
    assert (call["input_layout"], call["sparse_mode"]) == ("TND", 3)
    assert call["actual_seq_lengths_kv"] == [start + count for start, count in _BATCHES[batch]]


@pytest.mark.parametrize("dim", [64, 128])
def test_head_dims_of_64_and_128_take_one_call(npu_ops: NpuOps, dim: int) -> None:
    check(make_case(_BATCHES["mixed"], replace(_BF16, key_dim=dim, value_dim=dim)), _PLAIN)

    assert npu_ops.names().count(_FIA) == 1


@pytest.mark.parametrize(
    ("backend", "shape"),
    [
        *((NpuAttention(), replace(_BF16, key_dim=dim, value_dim=dim)) for dim in (16, 80, 96, 112, 256)),
        (NpuAttention(uses_tnd=False), _BF16),
    ],
    ids=["dim-16", "dim-80", "dim-96", "dim-112", "dim-256", "bsh-only"],
)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("batch", ["two-prefills", "decode-batch", "mixed"])
def test_other_layers_take_a_call_per_chunk_and_one_for_single_rows(
    npu_ops: NpuOps, batch: str, window: int | None, backend: NpuAttention, shape: Shape
) -> None:
    check(make_case(_BATCHES[batch], shape), replace(_PLAIN, sliding_window=window, scaling=0.06), backend)

    parts = _BATCHES[batch]
    chunks, singles = sum(count > 1 for _, count in parts), any(count == 1 for _, count in parts)
    assert npu_ops.names().count(_FIA) == chunks + singles
    assert {call.kwargs["input_layout"] for call in npu_ops.calls if call.name == _FIA} == {"BSH"}


def test_float16_uses_the_layout_that_supports_it(npu_ops: NpuOps) -> None:
    shape = replace(_BF16, dtype=torch.float16, pool_dtype=torch.float16)
    case = make_case(_BATCHES["mixed"], shape)
    rounded = [
        replace(one, query=one.query.half().float(), keys=one.keys.half().float(), values=one.values.half().float())
        for one in case.sequences
    ]

    check(replace(case, sequences=rounded), _PLAIN)

    assert {call.kwargs["input_layout"] for call in npu_ops.calls if call.name == _FIA} == {"BSH"}


@pytest.mark.parametrize("window", [1, 20, 128, 1000])
@pytest.mark.parametrize("batch", ["chunk", "decode-batch", "mixed"])
def test_a_window_is_a_band_of_one_call(npu_ops: NpuOps, batch: str, window: int) -> None:
    check(make_case(_BATCHES[batch], _BF16), replace(_PLAIN, sliding_window=window))

    (call,) = [call.kwargs for call in npu_ops.calls if call.name == _FIA]
    assert (call["input_layout"], call["sparse_mode"]) == ("TND", 3 if window == 1000 else 4)
    assert window == 1000 or call["pre_tokens"] == window - 1


@pytest.mark.parametrize("window", [1, 20, 128, 1000])
@pytest.mark.parametrize("batch", ["chunk", "decode-batch", "mixed"])
def test_bsh_has_bands_for_chunks_and_masks_for_single_rows(npu_ops: NpuOps, batch: str, window: int) -> None:
    check(make_case(_BATCHES[batch], _BF16), replace(_PLAIN, sliding_window=window), NpuAttention(uses_tnd=False))

    for call in (call.kwargs for call in npu_ops.calls if call.name == _FIA):
        single = "sparse_mode" not in call
        assert window == 1000 or single or call["pre_tokens"] == window - 1
        assert window == 1000 or not single or call["atten_mask"].shape[-1] % 128 == 0


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("batch", ["chunk", "decode-batch", "mixed"])
@pytest.mark.parametrize("uses_tnd", [True, False])
def test_sinks_take_part_in_the_softmax(npu_ops: NpuOps, batch: str, window: int | None, uses_tnd: bool) -> None:
    sinks = torch.tensor([0.125, 2.0, -1.0, 8.0])

    check(
        make_case(_BATCHES[batch], _BF16),
        replace(_PLAIN, sliding_window=window, sinks=sinks),
        NpuAttention(uses_tnd=uses_tnd),
    )

    assert (_FIA2 in npu_ops.names()) == uses_tnd


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (_BF16, AttentionOptions(0.125, softcap=2.0), "the op has no softcap, but the layer's is 2"),
        (replace(_BF16, pool_dtype=torch.float32), _PLAIN, "queries of torch.bfloat16 and keys of torch.float32"),
        (
            replace(_BF16, dtype=torch.float32, pool_dtype=torch.float32),
            _PLAIN,
            "float32: both must have one dtype of",
        ),
        (replace(_BF16, value_dim=32), _PLAIN, "head dims 64 of keys and 32 of values"),
        (replace(_BF16, key_dim=24, value_dim=24), _PLAIN, "head dim 24: the op supports multiples of 16 up to 512"),
        (replace(_BF16, num_heads=72, num_kv_heads=1), _PLAIN, "query heads 72, KV heads 1: the op supports"),
        (
            replace(_BF16, num_heads=128, num_kv_heads=2, key_dim=512, value_dim=512),
            _PLAIN,
            "128 heads with head dim 512: the op supports",
        ),
        (replace(_BF16, block_size=16), _PLAIN, "block size 16: the op supports multiples of 128 up to 512"),
    ],
    ids=["softcap", "mixed", "float32", "dims", "dim", "group", "columns", "block"],
)
def test_unsupported_layers_use_torch_with_one_log_line(
    npu_ops: NpuOps, shape: Shape, options: AttentionOptions, message: str, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    backend, case = NpuAttention(), make_case(_BATCHES["mixed"], shape)

    for _ in range(2):
        check(case, options, backend)

    assert set(npu_ops.names()) == {"npu_scatter_pa_kv_cache"}
    assert [message in record.getMessage() for record in caplog.records] == [True]


def test_only_the_steps_own_slots_are_written() -> None:
    case = make_case(_BATCHES["mixed"], replace(_BF16, value_dim=32))
    pool, before = case.pool_with_past(), case.pool_with_past()
    new_keys, new_values = torch.randn(2, 51, 64), torch.randn(2, 51, 32)
    mine = case.metadata.slots

    NpuAttention().plan(case.metadata).write(pool.keys, pool.values, new_keys, new_values)

    for got, old, new in ((pool.keys, before.keys, new_keys), (pool.values, before.values, new_values)):
        torch.testing.assert_close(got[mine], new.transpose(0, 1).bfloat16(), rtol=0, atol=0)
        old[mine] = got[mine]
        torch.testing.assert_close(got, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "options",
    [
        _PLAIN,
        replace(_PLAIN, sliding_window=20),
        replace(_PLAIN, sinks=torch.tensor([0.5, 1.0, -2.0, 3.0])),
        replace(_PLAIN, sliding_window=20, sinks=torch.tensor([0.5, 1.0, -2.0, 3.0])),
        replace(_PLAIN, softcap=2.0),
    ],
    ids=["plain", "window", "sinks", "window-sinks", "softcap"],
)
@pytest.mark.parametrize("width", [3, 5], ids=["narrow", "wide"])
def test_a_fixed_decode_step_reads_only_its_inputs(options: AttentionOptions, width: int) -> None:
    case = make_case(_BATCHES["decode-batch"], _BF16)
    host = read_tables(case.metadata.packed, 128)
    tables = torch.from_numpy(host.tables)
    wide = torch.cat([tables, tables[:, -1:].expand(-1, width - tables.shape[1])], 1)
    lengths = torch.from_numpy(host.kv_lengths)
    zero = torch.zeros(len(lengths), dtype=torch.int64)
    inputs = DecodeInputs(128, zero, lengths - 1, case.metadata.slots, lengths, wide)
    backend, pool = NpuAttention(), case.pool_with_past()
    decode = backend.plan_decode(inputs)

    reported = decode.prepare(host)
    step = decode.step()
    step.write(pool.keys, pool.values, case._new_rows("keys"), case._new_rows("values"))
    got = step.attend(case._new_rows("query"), pool.keys, pool.values, options)

    assert reported == {"actual_seq_lengths_kv": [4, 128, 129, 271, 1], "actual_seq_kvlen": [4, 128, 129, 271, 1]}
    torch.testing.assert_close(got.float(), case.expected(options), rtol=1e-2, atol=1e-2)


def test_tables_have_full_width_unless_torch_has_to_gather() -> None:
    backend = NpuAttention()

    assert backend.table_widths(3, 64, 128) == (64,)
    check(make_case(_BATCHES["decode"], _BF16), replace(_PLAIN, softcap=2.0), backend)
    assert backend.table_widths(3, 64, 128) == (10, 20, 40, 64)
