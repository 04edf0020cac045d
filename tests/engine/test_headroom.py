"""A pool on a device leaves what steps take: as much as the largest one does, and no less than a step takes later."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.headroom import LargestStep, decode_batch, largest_batch
from engine.loader import LoadedModel, load_model
from engine.torch_model import TorchModel
from tests.devices.capturing_device import CapturingDevice
from tests.devices.card_device import CardDevice
from tests.devices.fake_device import FakeDevice
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model
from wire.errors import ConfigError

TOTAL = 96 << 20
STEP = LargestStep(prompt_tokens=48, sequences=6)


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
    """Remembers what it measured."""

    def __init__(self) -> None:
        super().__init__(total_bytes=TOTAL)
        self.measured: list[int] = []

    def peak_bytes(self, run: Callable[[], None]) -> int:
        self.measured.append(super().peak_bytes(run))
        return self.measured[-1]


def test_the_pool_leaves_what_the_largest_step_takes_and_the_line_says_it(llama: Path) -> None:
    device = Measuring()
    without, loaded = load(llama, FakeDevice(total_bytes=TOTAL), None), load(llama, device)
    (headroom,) = device.measured

    assert headroom > STEP.sequences * VOCAB_SIZE * 4, "the logits alone are that many"
    assert pool_bytes(loaded) + headroom <= 0.9 * TOTAL
    block = loaded.model.memory.layout.token_bytes * 16
    assert abs(pool_bytes(without) - pool_bytes(loaded) - headroom) <= block
    assert note_of(loaded).endswith(f", {headroom / 2**20:.0f} MiB left to steps")
    assert "left to steps" not in note_of(without)
    loaded.model.close()
    without.model.close()


def test_no_step_within_the_bounds_takes_more_later(llama: Path) -> None:
    device = Measuring()
    model = load(llama, device).model
    (headroom,) = device.measured

    for batch in (largest_batch(model, STEP), largest_batch(model, LargestStep(20, 2)), decode_batch(model, 6)):
        assert FakeDevice().peak_bytes(lambda batch=batch: _launch(model, batch)) <= headroom  # type: ignore[misc]

    model.close()


def _launch(model: TorchModel, batch: Any) -> None:
    model.launch(batch).collect()


def test_more_tokens_and_more_sequences_take_more(llama: Path) -> None:
    took = []
    for step in (STEP, LargestStep(16, 6), LargestStep(48, 2)):
        device = Measuring()
        load(llama, device, step).model.close()
        took += device.measured

    assert took[0] > took[1]
    assert took[0] > took[2]


def test_the_largest_step_has_all_tokens_and_ends_the_longest_sequence(llama: Path) -> None:
    model = load(llama, FakeDevice(total_bytes=TOTAL)).model
    longest = model.info.max_model_len

    batch = largest_batch(model, STEP)

    assert len(batch.token_ids) == 48 + 5
    assert len(batch.samples) == len(batch.sequences) == 6
    assert (batch.sequences[0].start, batch.sequences[0].kv_length) == (longest - 48, longest)
    assert all(set(part.block_ids) == {0} for part in batch.sequences)
    assert all(part.count == 1 for part in batch.sequences[1:])
    assert largest_batch(model, LargestStep(10 * longest, 1)).sequences[0].count == longest
    model.close()


def test_graphs_have_their_part(llama: Path) -> None:
    device = CapturingDevice(total_bytes=TOTAL)

    eager, graphs = load(llama, device), load(llama, device, max_graph_rows=8)

    assert pool_bytes(eager) > pool_bytes(graphs)
    assert note_of(eager).endswith(" MiB left to steps")
    assert note_of(graphs).endswith(" MiB of it to graphs")
    eager.model.close()
    graphs.model.close()


def test_a_pool_of_the_users_own_size_is_not_measured_for(llama: Path) -> None:
    device = Measuring()

    loaded = load(llama, device, kv_cache_memory=4 << 20)

    assert device.measured == []
    assert "left to steps" not in note_of(loaded)
    loaded.model.close()


class Full(FakeDevice):
    def peak_bytes(self, run: Callable[[], None]) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_step_that_does_not_fit_beside_the_weights_is_refused_with_the_flags(llama: Path) -> None:
    words = (
        r"a step of 48 tokens of prompts and 6 sequences does not fit beside the weights on fake:0, of whose "
        r"\d+ bytes \d+ are free: lower --prefill-chunk-size or --max-num-seqs"
    )
    with pytest.raises(ConfigError, match=words):
        load(llama, Full())


def test_a_pool_that_has_no_room_beside_the_steps_says_so(llama: Path) -> None:
    device = Measuring()
    load(llama, device).model.close()

    device.total_bytes = device.measured[0]
    with pytest.raises(ConfigError, match=r"0 bytes of KV memory \(\d+ MiB left to steps\) are 0 blocks"):
        load(llama, device)


def test_what_else_fails_is_told_and_nothing_is_left(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeDevice):
        def peak_bytes(self, run: Callable[[], None]) -> int:
            raise RuntimeError("this driver counts nothing")

    loaded = load(llama, Broken(total_bytes=TOTAL))

    assert 'headroom_not_measured device=fake:0 error="RuntimeError: this driver counts nothing"' in caplog.text
    assert "left to steps" not in note_of(loaded)
    loaded.model.close()


def test_it_is_measured_on_a_card_whose_tensors_are_not_the_cpus(llama: Path) -> None:
    loaded = load(llama, CardDevice(TOTAL), LargestStep(24, 3))

    assert note_of(loaded).endswith(" MiB left to steps")
    assert pool_bytes(loaded) < 0.9 * TOTAL
    loaded.model.close()
