"""Decode steps by graphs: tokens equal transformers', and a replay reads only the fixed inputs."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention import torch_paged
from engine.attention.block_tables import HostTables
from engine.attention.cuda import CudaAttention, CudaDecode
from engine.attention.reference import ReferenceAttention
from engine.core import EngineCore
from engine.decode_graphs import DecodeGraphs, GraphShape, graph_rows, graph_shapes
from engine.loader import load_model
from engine.oracle import Oracle
from engine.rope import StepRope
from engine.step import BatchSequence, SampleRow, StepBatch
from engine.torch_model import TorchModel
from tests.devices.capturing_device import CapturingDevice, RecordedGraph
from tests.devices.fake_device import FakeDevice
from tests.devices.late_device import late_downloads
from tests.engine.fake_engines import run
from tests.engine.step_runner import GREEDY
from tests.engine.tiny_models import DISTINCT_KINDS, VOCAB_SIZE, make_tiny_model
from wire.kv_layout import KvTensor
from wire.types import PromptState, SamplingParams

_LENGTHS = (3, 16, 40, 61, 90, 7)


def load(
    path: Path, device: FakeDevice, *, kv_bytes: int = 4 << 20, rows: int = 8, block_size: int = 16
) -> TorchModel:  # fmt: skip
    return load_model(
        path, dtype="float32", block_size=block_size, kv_cache_memory=kv_bytes, num_threads=1, device=device,
        max_graph_rows=rows,
    ).model  # fmt: skip


def prompts_of(lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    numbers = random.Random(5)
    return [tuple(numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(length)) for length in lengths]


def serve(model: TorchModel, prompts: list[tuple[int, ...]], counts: list[int]) -> tuple[list[list[int]], EngineCore]:
    """Return each prompt's tokens; it has its own number of them, so that the batch grows and shrinks."""
    core = EngineCore(
        model, max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_size=24, swap_bytes=8 << 20
    )  # fmt: skip
    for number, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        params = SamplingParams(max_tokens=count, temperature=0.0)
        core.add(PromptState(f"p{number}", f"r{number}", prompt, params))
    answers = run(core)
    assert answers.failed == []
    return [answers.tokens[f"p{number}", 0] for number in range(len(prompts))], core


@pytest.mark.often("llama-False", "qwen3-True")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", DISTINCT_KINDS)
def test_tokens_equal_transformers_as_the_batch_grows_and_shrinks(kind: str, ahead: bool, tmp_path: Path) -> None:
    """`ahead`: a step is launched before the last one is collected, and the host does not know its tokens."""
    path, prompts = make_tiny_model(kind, tmp_path), prompts_of(_LENGTHS)
    device, counts = CapturingDevice(), [4, 9, 18, 11, 15, 7]
    device.traits = replace(device.traits, is_asynchronous=ahead)

    with late_downloads():
        got, core = serve(load(path, device), prompts, counts)

    expected = Oracle(path, "float32").generate_greedy(prompts, max(counts), ignore_eos=True)
    assert got == [tokens[:count] for tokens, count in zip(expected, counts, strict=True)]
    assert device.replays > 10
    assert device.captured == 4  # sizes 1, 2, 4 and 8
    core.close()


def test_tokens_are_those_of_transformers_under_preemption(tmp_path: Path) -> None:
    path, prompts = make_tiny_model("llama", tmp_path), prompts_of((40, 61, 90, 33))
    device = CapturingDevice()

    got, core = serve(load(path, device, kv_bytes=160 << 10), prompts, [40] * 4)

    assert core.load().preemptions > 0
    assert got == Oracle(path, "float32").generate_greedy(prompts, 40, ignore_eos=True)
    assert device.replays > 10
    core.close()


@pytest.mark.parametrize(("block_size", "spare"), [(16, 1), (4, 2)])
def test_each_row_of_padding_writes_an_unused_slot_of_its_own(block_size: int, spare: int, tmp_path: Path) -> None:
    device = CapturingDevice()
    model = load(make_tiny_model("llama", tmp_path), device, block_size=block_size)
    layout, pool = model.info.layout, model.memory.layout
    assert pool.num_blocks == layout.num_blocks + spare
    tensor: torch.Tensor = model.memory.tensor  # type: ignore[attr-defined]
    tensor.fill_(0)
    blocks = [0, 3, 5, 8, layout.num_blocks - 1]  # five sequences: three rows of padding

    launch(model, [(5, 0, (block,)) for block in blocks])

    assert (device.captured, device.replays) == (4, 1)
    ends = layout.num_blocks * block_size
    for index in range(len(pool.tensors)):
        start, size = pool.offsets[index], pool.tensors[index].token_bytes
        slots = tensor[start : start + pool.num_blocks * block_size * size].view(-1, size)
        written = slots.any(dim=1).nonzero().flatten().tolist()
        assert written == [*(block * block_size for block in blocks), ends, ends + 1, ends + 2]
    model.close()


def launch(model: TorchModel, rows: Sequence[tuple[int, int, tuple[int, ...]]], **more: Any) -> list[int]:
    """Run a step of (token, position, table) each and return the tokens it chose."""
    parts = tuple(BatchSequence(position, 1, table) for _, position, table in rows)
    samples = tuple(SampleRow(row, GREEDY, 0, 0) for row in range(len(rows)))
    batch = StepBatch(tuple(token for token, _, _ in rows), parts, samples)
    return list(model.launch(batch, **more).collect().token_ids)


def test_a_replay_reads_the_inputs_of_its_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_paged, "FEW_KEYS", 1)
    path = make_tiny_model("llama", tmp_path)
    device = CapturingDevice()
    graphs, plain = load(path, device), load(path, FakeDevice(), rows=0)
    captured = device.captured
    numbers = random.Random(2)
    seen = set()
    for position in range(40):  # tables of 1, 2 and 4 blocks
        step = [(numbers.randrange(3, 300), position, (4 + row, 9 + row, 14 + row)) for row in range(3)]
        chosen = launch(graphs, step)
        assert chosen == launch(plain, step)
        seen.add(tuple(chosen))

    assert (device.captured, device.replays) == (captured, 40)
    assert len(seen) > 10
    graphs.close()
    plain.close()


def test_only_the_rows_that_are_sampled_are_returned(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    graphs, plain = load(path, CapturingDevice()), load(path, FakeDevice(), rows=0)
    parts = tuple(BatchSequence(0, 1, (block,)) for block in (2, 5, 7))
    batch = StepBatch((5, 6, 7), parts, (SampleRow(2, GREEDY, 0, 0), SampleRow(0, GREEDY, 0, 0)))

    torch.testing.assert_close(graphs.logits(batch), plain.logits(batch), rtol=1e-5, atol=1e-5)

    kept = graphs.logits(batch)
    before = kept.clone()
    graphs.logits(replace(batch, token_ids=(9, 9, 9)))
    assert torch.equal(kept, before)  # not the graph's own
    graphs.close()
    plain.close()


def test_steps_that_fit_no_graph_are_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_paged, "MAX_KEYS", 64)  # two blocks for each of two rows, four for one
    device = CapturingDevice()
    model = load(make_tiny_model("llama", tmp_path), device, rows=2)
    prompt = StepBatch((3, 4, 5), (BatchSequence(0, 2, (2,)), BatchSequence(0, 1, (3,))), ())

    model.launch(prompt).collect()
    launch(model, [(5, 0, (row,)) for row in range(3)])
    launch(model, [(5, 0, (1,))], layer_done=lambda layer: None)
    launch(model, [(5, 40, (1, 2, 3)), (5, 0, (4,))])
    launch(model, [(5, 70, (1, 2, 3, 4, 5))])

    assert (device.captured, device.replays) == (2, 0)
    launch(model, [(5, 20, (row, row + 2)) for row in range(2)])
    launch(model, [(5, 40, (1, 2, 3))])
    assert (device.captured, device.replays) == (2, 2)
    model.close()


def test_no_graph_is_captured_after_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Largest first, so that smaller graphs reuse the memory of larger ones."""
    caplog.set_level("INFO")
    capture, order = DecodeGraphs.capture, list[GraphShape]()

    def recorded(self: DecodeGraphs, shape: GraphShape) -> None:
        order.append(shape)
        capture(self, shape)

    monkeypatch.setattr(DecodeGraphs, "capture", recorded)
    monkeypatch.setattr(torch_paged, "FEW_KEYS", 256)
    path, device, prompts = make_tiny_model("llama", tmp_path), CapturingDevice(), prompts_of(_LENGTHS)

    model = load(path, device)
    at_load = list(order)
    _, core = serve(model, prompts, [4, 9, 18, 11, 15, 7])

    assert at_load == sorted(at_load, reverse=True) == order
    assert {rows for rows, _ in order} == {1, 2, 4, 8}
    assert len(order) == device.captured > 4
    assert device.replays > 0
    lines = [line.getMessage() for line in caplog.records if line.getMessage().startswith("graphs_")]
    assert lines[0] == f"graphs_capturing graphs={len(order)} rows=8 device=fake:0"
    assert lines[-1].startswith(f"graphs_captured graphs={len(order)} seconds=")
    core.close()


def test_long_captures_report_their_progress(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model = load(make_tiny_model("llama", tmp_path), CapturingDevice())
    seconds = iter(range(0, 100, 1))
    caplog.clear()

    assert model.graphs is not None
    model.graphs.reset()
    model.graphs.capture_all(clock=lambda: next(seconds))

    assert [line.getMessage().partition(" seconds")[0] for line in caplog.records] == [
        "graphs_capturing graphs=4 rows=8 device=fake:0", "graphs_capturing done=2 graphs=4",
        "graphs_capturing done=4 graphs=4", "graphs_captured graphs=4",
    ]  # fmt: skip
    model.close()


def test_graphs_captured_again_leave_the_pool_as_it_was(tmp_path: Path) -> None:
    path, device = make_tiny_model("llama", tmp_path), CapturingDevice()
    graphs, plain = load(path, device), load(path, FakeDevice(), rows=0)
    step = [(5 + row, 0, (row,)) for row in range(3)]
    launch(graphs, step)
    assert graphs.graphs is not None
    graphs.graphs.reset()
    assert launch(graphs, step) == launch(plain, step)
    assert device.replays == 1
    layout = graphs.info.layout
    tensor: torch.Tensor = graphs.memory.tensor  # type: ignore[attr-defined]
    before = [tensor[start : start + layout.num_blocks * 16 * one.token_bytes].clone() for start, one in owned(graphs)]
    graphs.capture_graphs()

    for (start, _), kept in zip(owned(graphs), before, strict=True):
        assert torch.equal(tensor[start : start + len(kept)], kept)
    assert launch(graphs, step) == launch(plain, step)
    assert (device.captured, device.replays) == (8, 2)
    graphs.close()
    plain.close()


def owned(model: TorchModel) -> list[tuple[int, KvTensor]]:
    """Return each tensor of the pool with its offset."""
    layout = model.memory.layout
    return list(zip(layout.offsets, layout.tensors, strict=True))


def test_after_a_capture_that_fails_all_steps_are_launched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_tiny_model("llama", tmp_path)
    device, prompts = CapturingDevice(fails="operation not permitted when stream is capturing"), prompts_of((9, 20))

    got, core = serve(load(path, device), prompts, [8, 8])

    assert got == Oracle(path, "float32").generate_greedy(prompts, 8, ignore_eos=True)
    assert (device.captured, device.replays) == (0, 0)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("graphs_off rows=8 width=")
    assert "operation not permitted when stream is capturing" in warning
    core.close()


class FullDevice(CapturingDevice):
    """Has room for `room` graphs: the next capture raises what torch does, behind the words of the capture's end."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.tries = room, 0

    def capture(self, run: Callable[[], None]) -> RecordedGraph:
        self.tries += 1
        if self.captured >= self.room:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
            except torch.OutOfMemoryError:
                raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        return super().capture(run)


def test_a_full_card_keeps_the_graphs_that_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_tiny_model("llama", tmp_path)
    device = FullDevice(room=2)
    graphs, plain = load(path, device), load(path, FakeDevice(), rows=0)

    for rows in (1, 2, 3, 8, 4, 2, 1, 3):
        step = [(5 + row, 0, (row,)) for row in range(rows)]
        assert launch(graphs, step) == launch(plain, step)

    assert (device.tries, device.captured, device.replays) == (4, 2, 8)  # smaller steps are padded to 4 rows
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("graphs_limited first_left_out_rows=2 first_left_out_width=")
    assert " left_out=2 most_rows=8 graphs=2 device=fake:0 free_bytes=1073741824" in warning
    assert "CUDA out of memory. Tried to allocate 64.00 MiB." in warning
    graphs.close()
    plain.close()


def test_graphs_smaller_than_one_that_did_not_fit_are_captured(tmp_path: Path) -> None:
    class Narrow(FullDevice):
        def capture(self, run: Callable[[], None]) -> RecordedGraph:
            self.room = 0 if self.tries < 2 else 9
            return super().capture(run)

    device = Narrow(room=0)
    model = load(make_tiny_model("llama", tmp_path), device)

    for rows in (8, 4, 2, 1):
        launch(model, [(5, 0, (row,)) for row in range(rows)])

    assert (device.tries, device.captured, device.replays) == (4, 2, 2)
    model.close()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("the workspace is too small"), (8, 3)),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), (11, 6)),
    ],
)
def test_a_failed_plan_ends_replays_unless_memory_was_short(
    error: Exception, expected: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    path, device, prompts, plans = make_tiny_model("llama", tmp_path), CapturingDevice(), prompts_of((9, 20)), [0]

    def prepare(self: CudaDecode, host: HostTables) -> None:
        plans[0] += 1
        if plans[0] == 8:  # the load's four are done
            raise error

    monkeypatch.setattr(CudaDecode, "prepare", prepare)

    got, core = serve(load(path, device), prompts, [8, 8])

    assert got == Oracle(path, "float32").generate_greedy(prompts, 8, ignore_eos=True)
    assert (plans[0], device.replays) == expected
    core.close()


class OneWidth(CudaAttention):
    """Attention whose kernels read tables of any width."""

    def table_widths(self, rows: int, max_blocks: int, block_size: int) -> tuple[int, ...]:
        return (max_blocks,)


def test_graph_sizes_are_8_apart_or_powers_of_two_if_too_many() -> None:
    def sizes(max_rows: int) -> list[int]:
        shapes = graph_shapes(OneWidth(), max_rows, 5, 16)
        assert {width for _, width in shapes} == {5}
        return [rows for rows, _ in shapes]

    assert sizes(1) == [1]
    assert sizes(3) == [3, 2, 1]
    assert sizes(8) == [8, 4, 2, 1]
    assert sizes(30) == [30, 24, 16, 8, 4, 2, 1]
    assert len(sizes(256)) == 35
    assert sizes(1000) == [1000, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1]


@pytest.mark.parametrize("max_rows", [1, 7, 100, 256, 1024])
@pytest.mark.parametrize("length", [100, 4096, 131_072])
@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_there_are_at_most_64_graphs_and_none_gathers_too_much(max_rows: int, length: int, block_size: int) -> None:
    max_blocks = -(-length // block_size)

    shapes = graph_shapes(CudaAttention(), max_rows, max_blocks, block_size)

    assert 0 < len(shapes) <= 64
    assert len(set(shapes)) == len(shapes)
    for rows, width in shapes:
        assert 0 < width <= max_blocks
        assert rows * width * block_size <= torch_paged.MAX_KEYS
    assert max(width for rows, width in shapes if rows == 1) == min(max_blocks, torch_paged.MAX_KEYS // block_size)


def test_no_graphs_where_they_cannot_be(tmp_path: Path) -> None:
    path, device = make_tiny_model("llama", tmp_path), CapturingDevice()
    eager = load(path, device, rows=0)

    launch(eager, [(5, 0, (1,))])

    assert device.captured == 0
    assert eager.memory.layout.num_blocks == eager.info.layout.num_blocks
    assert graph_rows(8, FakeDevice(), ReferenceAttention(), None) == 0
    assert graph_rows(8, device, ReferenceAttention(), None) == 0
    assert graph_rows(8, device, CudaAttention(), StepRope()) == 0
    assert graph_rows(8, device, CudaAttention(), None) == 8
    eager.close()


@pytest.mark.parametrize("reads", ["a number", "a list", "another tensor"])
def test_a_graph_that_reads_anything_else_is_found(reads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, prompts = make_tiny_model("llama", tmp_path), prompts_of((9, 20))
    decode = TorchModel._decode
    kept: dict[int, torch.Tensor] = {}

    def cheating(self: TorchModel, inputs: Any, attention: Any) -> torch.Tensor:
        rows = len(inputs.positions)
        if reads == "a number":
            positions = inputs.positions + (int(inputs.positions[0]) * 0)
        elif reads == "a list":
            positions = torch.tensor([0] * rows)
        else:
            positions = kept.setdefault(rows, inputs.positions.clone())
        return decode(self, replace(inputs, positions=positions), attention)

    monkeypatch.setattr(TorchModel, "_decode", cheating)
    device = CapturingDevice()

    got, core = serve(load(path, device), prompts, [12, 12])

    expected = Oracle(path, "float32").generate_greedy(prompts, 12, ignore_eos=True)
    refused = device.replays == 0
    assert refused or got != expected
    assert refused == (reads != "another tensor")
    core.close()
