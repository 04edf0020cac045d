"""A pool on a device leaves memory for steps: as much as the largest one takes, and no later step takes more."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from devices import table
from devices.collectives import COLLECTIVES
from devices.device_pool import DevicePool
from engine.attention import torch_paged, varlen
from engine.attention.cuda import CudaAttention
from engine.headroom import LargestStep, decode_batch, largest_batch, num_blocks
from engine.loader import LoadedModel, load_model
from engine.ranks.budget import with_budget
from engine.ranks.rank_part import load_part
from engine.ranks.reduce import Reduce
from engine.ranks.setup import RankLoaded, RankSetup
from engine.step import SampleRow
from engine.torch_model import TorchModel
from testing.engine.fake_model import fake_info
from tests.devices.capturing_device import CapturingDevice
from tests.devices.fake_device import FakeDevice
from tests.devices.stream import StreamKind, stream_collective
from tests.engine.fake_engines import CONFIG
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model
from wire.errors import ConfigError
from wire.kv_layout import KvTensor, PoolLayout
from wire.types import SamplingParams

TOTAL = 96 << 20
STEP = LargestStep(prompt_tokens=48, sequences=6)
PLAIN = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1, max_tokens=1, seed=0)


def load(path: Path, device: Any, largest: LargestStep | None = STEP, **options: Any) -> LoadedModel:
    return load_model(
        path, dtype="float32", block_size=16, num_threads=1, device=device, largest_step=largest,
        **{"kv_cache_memory": None, **options},
    )  # fmt: skip


def pool_bytes(loaded: LoadedModel) -> int:
    return loaded.model.memory.layout.total_bytes


def note_of(loaded: LoadedModel) -> str:
    (note,) = [note for note in loaded.notes if note.startswith("KV pool: ")]
    return note


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path)


class Measuring(FakeDevice):
    """Records what it measured, and the pools that it made."""

    def __init__(self) -> None:
        super().__init__(total_bytes=TOTAL)
        self.measured: list[int] = []
        self.pools: list[int] = []

    def peak_bytes(self, run: Callable[[], None]) -> int:
        self.measured.append(super().peak_bytes(run))
        return self.measured[-1]

    def make_pool(self, layout: PoolLayout) -> DevicePool:
        self.pools.append(layout.total_bytes)
        return super().make_pool(layout)

    def left(self) -> int:
        """What the one step that was measured took beside its pool, the second time."""
        _, took = self.measured
        return took - self.pools[1]


def test_the_pool_leaves_memory_for_the_largest_step(llama: Path) -> None:
    device = Measuring()
    without, loaded = load(llama, FakeDevice(total_bytes=TOTAL), None), load(llama, device)
    headroom = device.left()

    assert headroom > STEP.sequences * VOCAB_SIZE * 4, "the logits alone are that many"
    assert pool_bytes(loaded) + headroom <= 0.9 * TOTAL
    block = loaded.model.memory.layout.token_bytes * 16
    assert abs(pool_bytes(without) - pool_bytes(loaded) - headroom) <= block
    assert note_of(loaded).endswith(f", {headroom / 2**20:.0f} MiB left for steps")
    assert "left for steps" not in note_of(without)
    loaded.model.close()
    without.model.close()


def test_no_step_within_the_bounds_takes_more_later(llama: Path) -> None:
    device = Measuring()
    model = load(llama, device).model
    headroom = device.left()

    for batch in (
        largest_batch(model.info, STEP),
        largest_batch(model.info, LargestStep(20, 2)),
        decode_batch(model.info, 6),
    ):
        assert FakeDevice().peak_bytes(lambda batch=batch: _launch(model, batch)) <= headroom  # type: ignore[misc]

    model.close()


def _launch(model: TorchModel, batch: Any) -> None:
    model.launch(batch).collect()


class KeepingWorkspace(Measuring):
    """A library allocates memory in the first measured step and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def peak_bytes(self, run: Callable[[], None]) -> int:
        def first_keeps() -> None:
            if not self.kept:
                self.kept.append(torch.zeros(8 << 20, dtype=torch.uint8))
            run()

        return super().peak_bytes(first_keeps)


def test_what_a_first_step_keeps_counts_as_in_use(llama: Path) -> None:
    plain, device = Measuring(), KeepingWorkspace()
    for one in (plain, device):
        load(llama, one).model.close()

    assert device.measured[0] - plain.measured[0] > 4 << 20
    assert abs(device.left() - plain.left()) < 1 << 20


def test_rows_with_penalties_and_masks_take_no_more_than_the_dummies(llama: Path) -> None:
    model = load(llama, FakeDevice(total_bytes=TOTAL)).model
    dummies = largest_batch(model.info, LargestStep(1, 64))
    params = replace(PLAIN, repetition_penalty=1.1)
    all_allowed = memoryview(b"\xff" * VOCAB_SIZE)
    shaped = tuple(
        SampleRow(row.row, params, 0, 1, history=(5,), prompt_length=1, mask=all_allowed) for row in dummies.samples
    )

    maximum, took, plain = (
        FakeDevice().peak_bytes(lambda samples=samples: _launch(model, replace(dummies, samples=samples)))  # type: ignore[misc]
        for samples in (dummies.samples, shaped, tuple(replace(row, params=PLAIN) for row in dummies.samples))
    )

    assert maximum >= took > plain
    model.close()


def test_dummy_sequences_hold_the_most_keys_attention_gathers() -> None:
    layout = PoolLayout([KvTensor(0, "k", 1, 8, "float32")], num_blocks=1, block_size=16)
    info = replace(fake_info(CONFIG), max_model_len=8192, layout=layout)

    gathered = sum(part.kv_length for part in decode_batch(info, 64).sequences)

    assert gathered >= max(torch_paged.MAX_KEYS, varlen.MAX_KEYS) - 64 * 16


def test_more_tokens_and_more_sequences_take_more(llama: Path) -> None:
    took = []
    for step in (STEP, LargestStep(16, 6), LargestStep(48, 2)):
        device = Measuring()
        load(llama, device, step).model.close()
        took.append(device.left())

    assert took[0] > took[1]
    assert took[0] > took[2]


def test_the_largest_step_has_all_tokens_and_the_longest_sequence(llama: Path) -> None:
    model = load(llama, FakeDevice(total_bytes=TOTAL)).model
    longest = model.info.max_model_len

    batch = largest_batch(model.info, STEP)

    assert len(batch.token_ids) == 48 + 5
    assert len(batch.samples) == len(batch.sequences) == 6
    assert (batch.sequences[0].start, batch.sequences[0].kv_length) == (longest - 48, longest)
    assert all(part.count == 1 for part in batch.sequences[1:])
    assert largest_batch(model.info, LargestStep(10 * longest, 1)).sequences[0].count == longest
    model.close()


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("longest", [5, 100, 4096])
@pytest.mark.parametrize("step", [STEP, LargestStep(1, 1), LargestStep(3000, 300)])
def test_dummy_steps_write_each_slot_once_in_the_smallest_pool(
    step: LargestStep, longest: int, block_size: int
) -> None:
    layout = PoolLayout([KvTensor(0, "k", 1, 8, "float32")], num_blocks=1, block_size=block_size)
    info = replace(fake_info(CONFIG), max_model_len=longest, layout=layout)
    maximum = num_blocks(info, step, step.sequences)

    for batch in (largest_batch(info, step), decode_batch(info, step.sequences)):
        slots = []
        for part in batch.sequences:
            assert part.kv_length <= longest
            assert len(part.block_ids) == -(-part.kv_length // block_size)
            places = range(part.start, part.kv_length)
            slots += [part.block_ids[place // block_size] * block_size + place % block_size for place in places]
        assert len(set(slots)) == len(slots) == len(batch.token_ids)
        assert min(slots) >= block_size, "what lies before is block 0, which nobody writes"
        assert max(slots) < maximum * block_size
    assert maximum * block_size <= step.prompt_tokens + step.sequences + 4 * block_size or longest < block_size


def test_graphs_have_their_share(llama: Path) -> None:
    device = CapturingDevice(total_bytes=TOTAL)

    eager, graphs = load(llama, device), load(llama, device, max_graph_rows=8)

    assert pool_bytes(eager) > pool_bytes(graphs)
    assert note_of(eager).endswith(" MiB left for steps")
    assert note_of(graphs).endswith(" MiB of it for graphs")
    eager.model.close()
    graphs.model.close()


@pytest.mark.parametrize(("collective", "rows"), [("nccl", 8), ("gloo", 0)])
def test_a_rank_leaves_graphs_their_share_where_it_can_capture(
    collective: str, rows: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph can contain only sums that stay on the stream."""
    monkeypatch.setitem(table.KINDS, "fake", StreamKind(collective))
    if collective != "gloo":
        monkeypatch.setitem(COLLECTIVES, collective, stream_collective(collective))

    def part(max_graph_rows: int) -> RankLoaded:
        setup = RankSetup(
            str(llama), "float32", 1, 2, 16, "auto", None, (), 1, 10.0, device="fake", max_model_len=64,
            largest_step=(48, 8), max_graph_rows=max_graph_rows,
        )  # fmt: skip
        return with_budget(load_part(setup, Reduce())).loaded

    eager, graphs = part(0), part(8)

    assert (eager.graph_rows, graphs.graph_rows) == (0, rows)
    assert (eager.pool_bytes > graphs.pool_bytes) == (rows > 0)
    assert graphs.device.endswith(" MiB of it for graphs") == (rows > 0)


def test_attention_workspaces_of_graphs_are_left_to_graphs(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_paged, "FEW_KEYS", 64)
    device = CapturingDevice(total_bytes=TOTAL)
    without = load(llama, device, max_graph_rows=2)
    requests: list[tuple[int, int]] = []

    def fixed_bytes(self: CudaAttention, rows: int, width: int) -> int:
        requests.append((rows, width))
        return 1 << 20

    monkeypatch.setattr(CudaAttention, "fixed_bytes", fixed_bytes)
    loaded = load(llama, device, max_graph_rows=2)

    block = loaded.model.memory.layout.token_bytes * 16
    graphs = set(requests)
    assert len(graphs) > 2
    assert {rows for rows, _ in graphs} == {1, 2}
    assert abs(pool_bytes(without) - pool_bytes(loaded) - (len(graphs) << 20)) <= block
    loaded.model.close()
    without.model.close()


def test_for_a_user_given_pool_size_nothing_is_measured(llama: Path) -> None:
    device = Measuring()

    loaded = load(llama, device, kv_cache_memory=4 << 20)

    assert device.measured == []
    assert "left for steps" not in note_of(loaded)
    loaded.model.close()


class Full(FakeDevice):
    def peak_bytes(self, run: Callable[[], None]) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_step_too_large_beside_the_weights_is_refused(llama: Path) -> None:
    words = (
        r"the largest step \(prompt tokens: 48, sequences: 6\) does not fit in addition to the weights on fake:0: "
        r"\d+ of \d+ bytes are free; lower --prefill-chunk-size or --max-num-seqs"
    )
    with pytest.raises(ConfigError, match=words):
        load(llama, Full())


def test_a_pool_without_room_beside_the_steps_is_refused(llama: Path) -> None:
    device = Measuring()
    load(llama, device).model.close()

    device.total_bytes = device.left()
    with pytest.raises(ConfigError, match=r"0 bytes of KV memory \(\d+ MiB left for steps\) are 0 blocks"):
        load(llama, device)


def test_other_failures_are_raised_and_leave_nothing(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeDevice):
        def peak_bytes(self, run: Callable[[], None]) -> int:
            raise RuntimeError("this driver counts nothing")

    loaded = load(llama, Broken(total_bytes=TOTAL))

    assert (
        'headroom_not_measured device=fake:0 reserved_bytes=0 error="RuntimeError: this driver counts nothing"'
        in caplog.text
    )
    assert "left for steps" not in note_of(loaded)
    loaded.model.close()
