"""Decode steps by graphs: tokens equal transformers', and a replay reads only the fixed inputs."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.cuda import CudaAttention, CudaDecode
from engine.attention.reference import ReferenceAttention
from engine.attention.tables import HostTables
from engine.core import EngineCore
from engine.decode_graphs import DecodeGraphs, graph_rows, graph_sizes
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
from tests.engine.tiny_models import KINDS, VOCAB_SIZE, make_tiny_model
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


@pytest.mark.parametrize(("kind", "ahead"), [*((kind, False) for kind in KINDS), ("llama", True), ("opt", True)])
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
    assert 1 < device.captured < device.replays  # sizes 1, 2, 4 and 8, some of them in two widths
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

    assert (device.captured, device.replays) == (1, 1)
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


def test_a_replay_reads_the_inputs_of_its_own_step(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    device = CapturingDevice()
    graphs, plain = load(path, device), load(path, FakeDevice(), rows=0)
    numbers = random.Random(2)
    seen = set()
    for position in range(40):
        step = [(numbers.randrange(3, 300), position, (4 + row, 9 + row, 14 + row)) for row in range(3)]
        chosen = launch(graphs, step)
        assert chosen == launch(plain, step)
        seen.add(tuple(chosen))

    assert (device.captured, device.replays) == (3, 40)  # widths 1, 2 and 4
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


def test_steps_with_prompts_or_many_rows_use_no_graph(tmp_path: Path) -> None:
    device = CapturingDevice()
    model = load(make_tiny_model("llama", tmp_path), device, rows=2)
    prompt = StepBatch((3, 4, 5), (BatchSequence(0, 2, (2,)), BatchSequence(0, 1, (3,))), ())

    model.launch(prompt).collect()
    launch(model, [(5, 0, (row,)) for row in range(3)])
    launch(model, [(5, 0, (1,))], layer_done=lambda layer: None)

    assert (device.captured, device.replays) == (0, 0)
    launch(model, [(5, 0, (row,)) for row in range(2)])
    assert (device.captured, device.replays) == (1, 1)
    model.close()


def test_after_a_capture_that_fails_all_steps_are_launched(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)
    device, prompts = CapturingDevice(fails="operation not permitted when stream is capturing"), prompts_of((9, 20))

    got, core = serve(load(path, device), prompts, [8, 8])

    assert got == Oracle(path, "float32").generate_greedy(prompts, 8, ignore_eos=True)
    assert (device.captured, device.replays) == (0, 0)
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


def test_a_full_card_keeps_the_sizes_captured_so_far(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_tiny_model("llama", tmp_path)
    device = FullDevice(room=2)
    graphs, plain = load(path, device), load(path, FakeDevice(), rows=0)

    for rows in (1, 2, 3, 8, 4, 2, 1, 3):
        step = [(5 + row, 0, (row,)) for row in range(rows)]
        assert launch(graphs, step) == launch(plain, step)

    assert (device.tries, device.captured, device.replays) == (3, 2, 4)  # 3 rows are padded to 4, and 8 are not tried
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("graphs_limited rows=4 width=1 most_rows=2 graphs=2 device=fake:0 free_bytes=1073741824")
    assert "CUDA out of memory. Tried to allocate 64.00 MiB." in warning
    graphs.close()
    plain.close()


def test_sizes_below_one_that_did_not_fit_are_captured_on_demand(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = FullDevice(room=0)
    model = load(make_tiny_model("llama", tmp_path), device)

    launch(model, [(5, 0, (row,)) for row in range(8)])
    device.room = 1
    for rows in (2, 2, 1, 1):
        launch(model, [(5, 0, (row,)) for row in range(rows)])

    assert (device.tries, device.captured, device.replays) == (3, 1, 2)
    assert [record.getMessage().split()[0] for record in caplog.records if record.levelname == "WARNING"] == [
        "graphs_limited"
    ], "it is said once"
    model.close()


def test_after_a_plan_that_fails_nothing_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, device, prompts, plans = make_tiny_model("llama", tmp_path), CapturingDevice(), prompts_of((9, 20)), [0]

    def prepare(self: CudaDecode, host: HostTables) -> None:
        plans[0] += 1
        if plans[0] == 4:
            raise RuntimeError("the workspace is too small")

    monkeypatch.setattr(CudaDecode, "prepare", prepare)

    got, core = serve(load(path, device), prompts, [8, 8])

    assert got == Oracle(path, "float32").generate_greedy(prompts, 8, ignore_eos=True)
    assert (plans[0], device.replays) == (4, 3)
    core.close()


def test_the_sizes_that_steps_are_padded_to() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(8) == (1, 2, 4, 8)
    assert graph_sizes(30) == (1, 2, 4, 8, 16, 24, 30)


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


@pytest.mark.parametrize("reads", ["a number", "a list", "a tensor of the step"])
def test_a_graph_that_reads_anything_else_is_found(reads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, prompts = make_tiny_model("llama", tmp_path), prompts_of((9, 20))
    run_graph = DecodeGraphs.run
    steps: list[Any] = []

    def remembering(self: DecodeGraphs, metadata: Any) -> Any:
        steps.append(metadata)
        return run_graph(self, metadata)

    decode = TorchModel._decode

    def cheating(self: TorchModel, inputs: Any, attention: Any) -> torch.Tensor:
        metadata, pad = steps[-1], len(inputs.positions) - len(steps[-1].packed.positions)
        if reads == "a number":
            positions = inputs.positions + (int(inputs.positions[0]) * 0)
        elif reads == "a list":
            positions = torch.tensor([*metadata.packed.positions, *[0] * pad])
        else:
            positions = torch.nn.functional.pad(metadata.positions[0], (0, pad))
        return decode(self, replace(inputs, positions=positions), attention)

    monkeypatch.setattr(DecodeGraphs, "run", remembering)
    monkeypatch.setattr(TorchModel, "_decode", cheating)
    device = CapturingDevice()

    got, core = serve(load(path, device), prompts, [12, 12])

    expected = Oracle(path, "float32").generate_greedy(prompts, 12, ignore_eos=True)
    refused = device.replays == 0
    assert refused or got != expected
    assert refused == (reads != "a tensor of the step")
    core.close()
