"""Images on a card whose tensors are not the CPU's: the tower's embeddings, and one step ahead of the host, tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

from devices.table import KINDS
from engine.core import EngineCore
from engine.loader import load_model
from engine.vision.tower import VisionTower
from tests.devices.card import count_copies, kind_name, torch_device
from tests.devices.card_device import CardDevice, CardKind
from tests.engine.fake_engines import run
from tests.engine.tiny_vision_models import VISION, VisionOracle, asked, make_vision_model
from tests.images.image_files import file_of, image_of
from tests.images.tiny_processors import write_processor


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


@pytest.mark.often("gemma3", "qwen2_vl")
@pytest.mark.parametrize("name", VISION)
def test_a_tower_on_a_card_gives_the_embeddings_of_the_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, kind_name(), CardKind())
    window_index = modeling_qwen2_5_vl.get_vision_window_index

    def on_the_card(*grids: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        index, lengths = window_index(*grids, **options)
        return index.to(torch_device()), lengths  # torch itself moves such an index, which the card refuses

    folder = write_processor(name, make_vision_model(name, tmp_path / name))
    files = file_of(image_of(30, 20)), file_of(image_of(20, 31, seed=1), "JPEG")
    expected = [VisionTower(folder, "float32", "cpu").encode(data) for data in files]
    monkeypatch.setattr(modeling_qwen2_5_vl, "get_vision_window_index", on_the_card)

    tower = VisionTower(folder, "float32", str(torch_device()))

    for data, one in zip(files, expected, strict=True):
        encoded = tower.encode(data)
        values, wanted = (torch.frombuffer(bytearray(it.values), dtype=torch.float32) for it in (encoded, one))
        assert encoded.tokens == one.tokens
        assert torch.allclose(values, wanted, atol=1e-5)
