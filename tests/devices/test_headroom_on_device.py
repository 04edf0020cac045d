"""The headroom for steps on every device covers what its steps use; attention is the device's own."""

import gc
from pathlib import Path

from devices.interface import Device
from engine.headroom import LargestStep, decode_batch, largest_batch
from engine.loader import load_model
from tests.engine.tiny_models import make_tiny_model

STEP = LargestStep(prompt_tokens=40, sequences=4)
MIB = 1 << 20


def test_the_largest_steps_stay_within_the_headroom(accelerator: Device, tmp_path: Path) -> None:
    gc.collect()  # frees the pools of other tests
    loaded = load_model(
        make_tiny_model("qwen3", tmp_path), dtype="float32", block_size=accelerator.traits.block_size,
        kv_cache_memory=None, num_threads=1, device=accelerator, gpu_memory_utilization=0.6, largest_step=STEP,
    )  # fmt: skip
    (note,) = [note for note in loaded.notes if note.startswith("KV pool: ")]
    left = int(note.rpartition(", ")[2].removesuffix(" MiB left for steps"))
    model, info = loaded.model, loaded.model.info

    for batch in (largest_batch(info, STEP), decode_batch(info, 4)):
        took = accelerator.peak_bytes(lambda batch=batch: model.launch(batch).collect())  # type: ignore[misc, arg-type]
        assert 0 < took <= (left + 0.5) * MIB
    model.close()


def test_a_closed_model_frees_the_memory_of_its_pool(accelerator: Device, tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path)

    def run() -> None:
        model = load_model(
            path, dtype="float32", block_size=128, kv_cache_memory=64 * MIB, num_threads=1, device=accelerator
        ).model  # fmt: skip
        models.append(model)
        model.close()

    def twice() -> None:
        run()
        run()

    models: list[object] = []
    assert 64 * MIB <= accelerator.peak_bytes(twice) < 100 * MIB
