"""Attention on GPUs as far as it runs on a CPU: fixed decode steps, groups, and the calls of FlashInfer."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from engine import decode_graphs
from engine.attention import flashinfer_paged, torch_paged, varlen
from engine.attention.block_tables import DecodeInputs, HostTables, read_tables
from engine.attention.cuda import CudaAttention, choose_libraries
from engine.attention.flashinfer_paged import FIXED_WORKSPACE_BYTES, FlashInferAttention
from engine.attention.interface import AttentionBackend, AttentionOptions, GraphBackend, StepAttention
from engine.attention.torch_paged import TorchPagedAttention
from engine.attention.varlen import VarlenAttention
from engine.decode_graphs import DecodeGraphs
from tests.devices.fake_device import FakeDevice
from tests.engine import flashinfer_stand_in
from tests.engine.attention_case import Case, Shape, make_case

_DECODES = [(3, 1), (16, 1), (15, 1), (70, 1), (0, 1), (64, 1)]
_MIXED = [(9, 1), (0, 18), (33, 1), (20, 30), (1, 1)]
_HALF = Shape(num_heads=8, num_kv_heads=2, key_dim=64, value_dim=64, dtype=torch.bfloat16, pool_dtype=torch.bfloat16)
_SINKS = torch.tensor([0.1, 2.0, -1.0, 0.5])
_EIGHT = torch.cat([_SINKS, _SINKS + 1])


@pytest.fixture(autouse=True)
def no_wrapper_is_made_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_stand_in._Wrapper.made.clear()
    monkeypatch.setattr(flashinfer_paged, "WORKSPACE_BYTES", flashinfer_stand_in.MIN_WORKSPACE)


def made_wrappers() -> list[Any]:
    return flashinfer_stand_in._Wrapper.made


def with_flashinfer() -> CudaAttention:
    return CudaAttention([FlashInferAttention(flashinfer_stand_in, FakeDevice())], "flashinfer's stand-in")


def with_flash(kernel: "Varlen") -> CudaAttention:
    return CudaAttention([VarlenAttention(kernel)])


def fixed_inputs(case: Case, *, padded: int, width: int) -> tuple[DecodeInputs, HostTables]:
    """Return the case's step in tables of `width` blocks, with `padded` rows more that have a block of their own."""
    packed, size = case.metadata.packed, case.metadata.block_size
    spare = max(block for one in case.metadata.sequences for block in one.block_ids) + 1
    short = read_tables(packed, size)
    host = short.padded(len(short.used) + padded, spare, size)
    tables = np.full((len(host.used), width), spare, np.int64)
    tables[:, : host.tables.shape[1]] = host.tables
    slots = torch.tensor([*packed.slots, *range(spare * size, spare * size + padded)])
    zeros = torch.zeros(len(tables), dtype=torch.int64)
    inputs = DecodeInputs(size, zeros, zeros, slots, torch.from_numpy(host.kv_lengths), torch.from_numpy(tables))
    return inputs, host


class Fixed:
    """A backend that runs each step of a case as a fixed decode step, with padding rows and wide tables."""

    def __init__(self, backend: GraphBackend | FlashInferAttention, case: Case) -> None:
        self._inputs, host = fixed_inputs(case, padded=2, width=9)
        self._decode = backend.plan_decode(self._inputs)
        self._decode.prepare(host)

    def run(self, case: Case, options: AttentionOptions) -> torch.Tensor:
        shape, pool = case.shape, case.pool_with_past()
        pad = torch.full((case.metadata.block_size, *pool.keys.shape[1:]), float("nan"), dtype=pool.keys.dtype)
        keys, values = torch.cat([pool.keys, pad]), torch.cat([pool.values, pad])
        heads = {"query": shape.num_heads, "keys": shape.num_kv_heads, "values": shape.num_kv_heads}
        rows = [
            torch.cat([case._new_rows(name), torch.randn(count, 2, shape.key_dim).to(shape.dtype)], dim=1)
            for name, count in heads.items()
        ]
        step: StepAttention = self._decode.step()
        step.write(keys, values, rows[1], rows[2])
        out = step.attend(rows[0], keys, values, options)
        assert out.isfinite().all()
        return out[:-2]


def agree(got: torch.Tensor, case: Case, options: AttentionOptions) -> None:
    rtol, atol = (1e-2, 1e-2) if case.shape.dtype == torch.bfloat16 else (1e-4, 1e-5)
    torch.testing.assert_close(got.float(), case.expected(options), rtol=rtol, atol=atol)


@pytest.mark.parametrize("window", [None, 1, 7, 33, 64, 1000])
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_fixed_decode_step_equals_dense(block_size: int, window: int | None) -> None:
    case = make_case(_DECODES, Shape(block_size=block_size))
    fixed = Fixed(CudaAttention(), case)

    for options in (
        AttentionOptions(0.35, window), AttentionOptions(0.35, window, softcap=2.0),
        AttentionOptions(0.35, window, sinks=_SINKS), AttentionOptions(0.35, window, 2.0, _SINKS),
    ):  # fmt: skip
        agree(fixed.run(case, options), case, options)


@pytest.mark.parametrize("max_keys", [1, 40, 200])
@pytest.mark.parametrize("parts", [_DECODES, _MIXED])
def test_rows_that_do_not_fit_one_gather_are_grouped(
    parts: list[tuple[int, int]], max_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_paged, "MAX_KEYS", max_keys)
    monkeypatch.setattr(torch_paged, "_MAX_SCORES", 50)
    case = make_case(parts, Shape())

    for options in (AttentionOptions(0.35), AttentionOptions(0.35, 7, 2.0, _SINKS)):
        agree(case.run(TorchPagedAttention(), options), case, options)


def test_a_decode_batch_is_one_call_whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    weigh = torch_paged._weigh

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return weigh(*args, **kwargs)

    monkeypatch.setattr(torch_paged, "_weigh", counted)
    case = make_case([(length, 1) for length in range(3, 90, 2)], Shape())

    agree(case.run(TorchPagedAttention(), AttentionOptions(0.35)), case, AttentionOptions(0.35))

    assert len(calls) == 1


@pytest.mark.combinations(2)
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, _EIGHT], ids=["no-sinks", "sinks"])
@pytest.mark.parametrize("parts", [_DECODES, _MIXED, [(0, 37)], [(40, 1)]], ids=["decode", "mixed", "prompt", "one"])
def test_flashinfer_gets_the_steps_arguments(
    parts: list[tuple[int, int]], sinks: torch.Tensor | None, softcap: float | None, window: int | None
) -> None:
    case, options = make_case(parts, _HALF), AttentionOptions(0.1, window, softcap, sinks)

    agree(case.run(with_flashinfer(), options), case, options)

    decodes = all(count == 1 for _, count in parts)
    kind = "BatchDecodeWithPagedKVCacheWrapper" if decodes else "BatchPrefillWithPagedKVCacheWrapper"
    assert [(type(one).__name__, one.num_plans) for one in made_wrappers()] == [(kind, 1)]
    assert made_wrappers()[0].arguments["window_left"] == (-1 if window is None else window - 1)


@pytest.mark.parametrize(("heads", "cores"), [(2, False), (4, False), (6, True), (16, True)])
def test_large_groups_decode_on_tensor_cores(heads: int, cores: bool) -> None:
    case, options = make_case(_DECODES, replace(_HALF, num_heads=heads)), AttentionOptions(0.1)

    agree(case.run(with_flashinfer(), options), case, options)

    assert made_wrappers()[0].use_tensor_cores is cores


def test_layers_of_one_kind_share_a_plan_and_steps_a_wrapper() -> None:
    backend, case = with_flashinfer(), make_case(_DECODES, _HALF)
    pool = case.pool_with_past()
    query = case._new_rows("query")
    for _ in range(3):
        step = backend.plan(case.metadata)
        step.write(pool.keys, pool.values, case._new_rows("keys"), case._new_rows("values"))
        for options in (
            AttentionOptions(0.1), AttentionOptions(0.1, 20), AttentionOptions(0.1),
            AttentionOptions(0.1, sinks=torch.zeros(8)), AttentionOptions(0.1, sinks=torch.ones(8)),
        ):  # fmt: skip
            step.attend(query, pool.keys, pool.values, options)

    assert [one.num_plans for one in made_wrappers()] == [3, 3]


@pytest.mark.parametrize(
    "options", [AttentionOptions(0.1), AttentionOptions(0.1, 20), AttentionOptions(0.1, sinks=_EIGHT)],
    ids=["plain", "window", "sinks"],
)  # fmt: skip
def test_flashinfer_plans_fixed_decode_steps_into_fixed_places(options: AttentionOptions) -> None:
    backend = with_flashinfer()
    case = make_case(_DECODES, _HALF)
    fixed = Fixed(backend, case)

    agree(fixed.run(case, options), case, options)

    (wrapper,) = made_wrappers()
    assert wrapper.use_cuda_graph
    places = [buffer.data_ptr() for buffer in wrapper._buffers]
    later = make_case([(start + 17, 1) for start, _ in _DECODES], _HALF)
    inputs, host = fixed_inputs(later, padded=2, width=9)
    for mine, new in (
        (fixed._inputs.slots, inputs.slots), (fixed._inputs.tables, inputs.tables),
        (fixed._inputs.kv_lengths, inputs.kv_lengths),
    ):  # fmt: skip
        mine.copy_(new)
    fixed._decode.prepare(host)
    agree(fixed.run(later, options), later, options)
    assert [buffer.data_ptr() for buffer in wrapper._buffers] == places
    assert len(made_wrappers()) == 1


@dataclass
class RunningAgain(FakeDevice):
    """A device whose graphs run again what was captured."""

    captures_graphs: bool = True

    def capture(self, run: Callable[[], None]) -> Any:
        run()
        return SimpleNamespace(replay=lambda host_lengths: run())


@pytest.mark.parametrize("takes_all", [True, False], ids=["its layers", "a layer of torch's"])
def test_a_replay_transfers_no_more_than_the_blocks_in_use(takes_all: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long sequences may become: here 1,024 blocks each."""
    case, max_blocks, sent = make_case(_DECODES, _HALF), 1024, list[int]()
    pool, rows, out = case.pool_with_past(), len(_DECODES), list[torch.Tensor]()
    spare, more = len(pool.keys) // 16, torch.zeros(16, *pool.keys.shape[1:], dtype=pool.keys.dtype)
    held = torch.cat([pool.keys, more]), torch.cat([pool.values, more])
    query, keys, values = (case._new_rows(name) for name in ("query", "keys", "values"))
    backend = with_flashinfer()
    kinds = [AttentionOptions(0.1), *([] if takes_all else [AttentionOptions(0.1, softcap=2.0)])]
    monkeypatch.setattr(FlashInferAttention, "has_softcap", False)

    def forward(inputs: DecodeInputs, attention: StepAttention) -> torch.Tensor:
        pad = len(inputs.token_ids) - rows
        new = [torch.nn.functional.pad(one, (0, 0, 0, pad)) for one in (query, keys, values)]
        attention.write(*held, new[1], new[2])
        out[:] = [attention.attend(new[0], *held, options)[:rows] for options in kinds]
        return torch.zeros(len(inputs.token_ids), 4)

    def counted(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        sent.append(tensor.numel())
        return tensor

    for module in (decode_graphs, flashinfer_paged):
        monkeypatch.setattr(module, "upload", counted)
    graphs = DecodeGraphs(
        RunningAgain(), backend, forward, block_size=16, spare_block=spare, max_rows=8, max_blocks=max_blocks
    )  # fmt: skip
    graphs.capture_all()  # the first capture finds out that a layer is torch's, which needs narrow tables
    assert (len(graphs.shapes) == 4) == takes_all
    sent.clear()

    with torch.inference_mode():  # as a step runs
        graphs.run(case.metadata)

    used = sum(start // 16 + 1 for start, _ in _DECODES) + 2
    assert sent == [4 * 8 + (0 if takes_all else 8 * 32), used]
    for made_of, options in zip(out, kinds, strict=True):
        agree(made_of, case, options)


def test_block_tables_are_rectangular_or_concatenated() -> None:
    tables = HostTables(np.array([5, 6, 7, 9]), np.array([3, 1]), np.array([33, 2]))

    assert tables.tables.tolist() == [[5, 6, 7], [9, 9, 9]]
    assert tables.rectangle(4).tolist() == [[5, 6, 7, 7], [9, 9, 9, 9]]
    padded = tables.padded(5, 20, block_size=2)
    assert (padded.blocks.tolist(), padded.used.tolist()) == ([5, 6, 7, 9, 20, 20, 21], [3, 1, 1, 1, 1])
    assert padded.kv_lengths.tolist() == [33, 2, 1, 2, 1]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (replace(_HALF, dtype=torch.float32, pool_dtype=torch.float32), AttentionOptions(0.1)),
        (replace(_HALF, dtype=torch.float32), AttentionOptions(0.1)),
        (replace(_HALF, key_dim=80, value_dim=80), AttentionOptions(0.1)),
        (replace(_HALF, key_dim=96, value_dim=96, num_heads=4), AttentionOptions(0.1, sinks=_SINKS)),
        (replace(_HALF, value_dim=128), AttentionOptions(0.1)),
    ],
    ids=["float32", "mixed-dtypes", "dim-80", "dim-96", "two-dims"],
)
def test_unsupported_steps_go_to_torch(shape: Shape, options: AttentionOptions) -> None:
    backend, case = with_flashinfer(), make_case(_MIXED, shape)
    assert backend.table_widths(3, 999, 16) == (999,)

    agree(case.run(backend, options), case, options)

    assert made_wrappers() == []
    assert backend.table_widths(3, 999, 16) == (85, 170, 340, 680, 999)


def test_flashinfer_has_a_workspace_per_fixed_step_and_layer_kind() -> None:
    backend, case = with_flashinfer(), make_case(_DECODES, _HALF)
    assert backend.fixed_bytes(4, 10) == 0, "no layer ran"

    agree(case.run(backend, AttentionOptions(0.1)), case, AttentionOptions(0.1))
    one = backend.fixed_bytes(4, 10)
    case.run(backend, AttentionOptions(0.1, sliding_window=7))

    assert one == FIXED_WORKSPACE_BYTES + 4 * (4 * 10 + 3 * 4 + 2)
    assert backend.fixed_bytes(4, 10) == 2 * one
    assert CudaAttention().fixed_bytes(4, 10) == 0


def test_a_library_that_fails_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("nvcc not found")

    monkeypatch.setattr(flashinfer_stand_in.BatchDecodeWithPagedKVCacheWrapper, "plan", fail)
    backend, case, options = with_flashinfer(), make_case(_DECODES, _HALF), AttentionOptions(0.1)

    agree(case.run(backend, options), case, options)
    agree(case.run(backend, options), case, options)

    assert len(made_wrappers()) == 1
    assert "nvcc not found" in backend.note
    assert backend.libraries == ()
    assert len(backend.table_widths(3, 999, 16)) > 1


def test_the_next_library_takes_over_from_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel image")

    kernel = Varlen()
    monkeypatch.setattr(flashinfer_stand_in.BatchDecodeWithPagedKVCacheWrapper, "run", fail)
    flash = VarlenAttention(kernel)
    backend = CudaAttention([FlashInferAttention(flashinfer_stand_in, FakeDevice()), flash])
    case, options = make_case(_DECODES, _HALF), AttentionOptions(0.1)

    agree(case.run(backend, options), case, options)
    assert [*backend.libraries] == [flash]
    assert len(kernel.calls) == 1
    monkeypatch.setattr(Varlen, "__call__", fail)
    agree(case.run(backend, options), case, options)

    assert backend.libraries == ()
    assert backend.note == "attention by torch: VarlenAttention failed: no kernel image"


def test_a_fixed_step_survives_leaving_its_library() -> None:
    backend, options = with_flashinfer(), AttentionOptions(0.1)
    case = make_case(_DECODES, _HALF)
    fixed = Fixed(backend, case)
    backend.give_up(backend.libraries[0], RuntimeError("no kernel image"))

    agree(fixed.run(case, options), case, options)

    assert made_wrappers() == []


@pytest.mark.parametrize(
    ("package", "has_flash", "names", "note"),
    [
        (None, False, [], "attention by torch: flashinfer is not installed, torch is built without its flash kernel"),
        (None, True, [VarlenAttention], "attention by torch's flash kernel: flashinfer is not installed"),
        (flashinfer_stand_in, True, [FlashInferAttention, VarlenAttention],
         "attention by flashinfer 9, else by torch's flash kernel"),
        (SimpleNamespace(), True, [VarlenAttention],
         "attention by torch's flash kernel: flashinfer 9 cannot be used: "),
    ],
    ids=["none", "torch's", "both", "another flashinfer"],
)  # fmt: skip
def test_libraries_are_chosen_with_a_reason(
    package: Any, has_flash: bool, names: list[type], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = (None, "flashinfer is not installed") if package is None else (package, "flashinfer 9")
    monkeypatch.setattr("engine.attention.cuda.find_flashinfer", lambda: found)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: has_flash)

    libraries, note_logged = choose_libraries(FakeDevice())

    assert [type(one) for one in libraries] == names
    assert note_logged.startswith(note)
    assert [one.kernel for one in libraries if isinstance(one, VarlenAttention)] == [varlen_attn] * has_flash


class Varlen:
    """Stands in for varlen_attn on the CPU: its arguments go through the real one's, without numbers, first."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(varlen_attn).bind(*args, **kwargs)
        given.apply_defaults()
        reported = given.arguments
        self.calls.append(reported)
        real: Any = varlen_attn
        of_meta = {
            name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in reported.items()
        }
        shapes = [one.shape for one in real(**of_meta | {"return_aux": AuxRequest(lse=True)})]
        query, keys, values, ends = (
            reported["query"],
            reported["key"],
            reported["value"],
            (reported["cu_seq_q"], reported["cu_seq_k"]),
        )
        assert query.is_contiguous()
        assert [one.dtype for one in (query, keys, values, *ends)] == [torch.bfloat16] * 3 + [torch.int32] * 2
        assert (int(ends[0][-1]), int(ends[1][-1])) == (len(query), len(keys))
        counts, lengths = (one.diff() for one in ends)
        assert (reported["max_q"], reported["max_k"]) == (int(counts.max()), int(lengths.max()))
        outputs, logarithms = [], []
        for number, (count, length) in enumerate(zip(counts.tolist(), lengths.tolist(), strict=True)):
            first, start = int(ends[0][number]), int(ends[1][number])
            group = query.shape[1] // keys.shape[1]
            assert group == 1 or reported["enable_gqa"]
            own = [x[start : start + length].double().repeat_interleave(group, 1) for x in (keys, values)]
            scores = torch.einsum("qhd,khd->hqk", query[first : first + count].double(), own[0]) * reported["scale"]
            at, key = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
            left, right = reported["window_size"]
            assert right == 0
            hidden = key > at
            if left >= 0:
                hidden = hidden | (key < at - left)
            scores = scores.masked_fill(hidden, float("-inf"))
            outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), own[1]).to(query.dtype))
            logarithms.append(scores.logsumexp(-1).float())
        made = torch.cat(outputs), torch.cat(logarithms, 1)
        assert [one.shape for one in made] == shapes
        return made if reported["return_aux"] else made[0]


@pytest.mark.combinations(2)
@pytest.mark.parametrize("max_keys", [1, 60, 1 << 18])
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("sinks", [None, _EIGHT], ids=["no-sinks", "sinks"])
@pytest.mark.parametrize("dim", [64, 80, 96, 112])
@pytest.mark.parametrize("parts", [_DECODES, _MIXED, [(0, 37)]], ids=["decode", "mixed", "prompt"])
def test_a_step_is_one_call_of_torchs_flash_kernel(
    parts: list[tuple[int, int]], dim: int, sinks: torch.Tensor | None, window: int | None, max_keys: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(varlen, "MAX_KEYS", max_keys)
    kernel, options = Varlen(), AttentionOptions(0.1, window, sinks=sinks)
    backend, case = with_flash(kernel), make_case(parts, replace(_HALF, key_dim=dim, value_dim=dim))

    agree(case.run(backend, options), case, options)

    assert len(kernel.calls) == {1: len(parts), 1 << 18: 1}.get(max_keys, len(kernel.calls))
    assert len(kernel.calls) <= len(parts)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (replace(_HALF, dtype=torch.float32, pool_dtype=torch.float32), AttentionOptions(0.1)),
        (replace(_HALF, key_dim=60, value_dim=60), AttentionOptions(0.1)),
        (replace(_HALF, key_dim=264, value_dim=264), AttentionOptions(0.1)),
        (replace(_HALF, value_dim=128), AttentionOptions(0.1)),
        (_HALF, AttentionOptions(0.1, softcap=2.0)),
    ],
    ids=["float32", "dim-60", "dim-264", "two-dims", "softcap"],
)
def test_steps_the_flash_kernel_cannot_run_use_plain_operations(shape: Shape, options: AttentionOptions) -> None:
    kernel = Varlen()
    case = make_case(_MIXED, shape)

    agree(case.run(with_flash(kernel), options), case, options)

    assert kernel.calls == []


def test_fixed_decode_steps_without_flash_use_plain_operations() -> None:
    kernel, options = Varlen(), AttentionOptions(0.1, 20)
    backend, case = with_flash(kernel), make_case(_DECODES, _HALF)

    agree(Fixed(backend, case).run(case, options), case, options)

    assert kernel.calls == []
    assert len(backend.table_widths(3, 999, 16)) > 1


@pytest.mark.parametrize("wrong", ["last_lengths", "indptr", "indices", "query_ends"])
def test_the_stand_in_refuses_other_dtypes(wrong: str) -> None:
    case = make_case(_MIXED, _HALF)
    backend: AttentionBackend = FlashInferAttention(flashinfer_stand_in, FakeDevice())
    right = flashinfer_paged._pages

    def broken(*args: Any) -> Any:
        pages = right(*args)
        return replace(pages, **{wrong: getattr(pages, wrong).long()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer_paged, "_pages", broken)
        with pytest.raises(ValueError, match="int32"):
            case.run(backend, AttentionOptions(0.1))
