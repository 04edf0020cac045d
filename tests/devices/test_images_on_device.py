"""Images on a card whose tensors are not the CPU's, one step ahead of the host: tokens equal transformers'."""

from pathlib import Path

import pytest

from engine.core import EngineCore
from engine.loader import load_model
from tests.devices.card import count_copies
from tests.devices.card_device import CardDevice
from tests.engine.fake_engines import run
from tests.engine.tiny_vision_models import VISION, VisionOracle, asked, make_vision_model


@pytest.mark.often("qwen2_vl-card")
@pytest.mark.parametrize("attention", ["card", "cuda"])
@pytest.mark.parametrize("name", VISION)
def test_prompts_with_images_equal_transformers(name: str, attention: str, tmp_path: Path) -> None:
    path = make_vision_model(name, tmp_path / name)
    oracle, device = VisionOracle(path), CardDevice(is_asynchronous=True, attention=attention)
    model = load_model(
        path, dtype="float32", block_size=16, kv_cache_memory=4 << 20, num_threads=1, device=device
    ).model
    core = EngineCore(model, max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_size=24)
    for state, pictures in asked(name):
        core.add(state, embeddings=oracle.embeddings(pictures))

    with count_copies() as copies:
        answers = run(core)

    assert (core.runs_ahead, answers.failed) == (True, [])
    assert [answers.tokens[f"p{n}", 0] for n in range(6)] == [oracle.generate(*one) for one in asked(name)]
    assert not copies.reads, f"the host waits in {dict(copies.reads)}"
    core.close()
