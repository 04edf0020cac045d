"""The model of this machine that stands for each model of vLLM's tests: there is no model hub.

All have the tokenizer of the default model, whose vocabulary is as large as those of the tests' models.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    LlamaConfig,
    XLMRobertaConfig,
)

from engine.checkpoints.default_model import ensure_default_model
from pdserve.run_folder import default_cache_dir
from tests.conformance.scripted_model import make_scripted_model
from tests.engine.tiny_encoders import write_pooling
from tests.instance.image_prompts import make_chat_model
from tests.vllm_server_tests.plugin_variables import MODELS

_VOCABULARY = 250_002
"""Of the vectors' model: tests send ids of its vocabulary."""
_NO_END = 49_151
_MANY_LAYERS = 200
"""Of models whose answers take seconds: a test looks at running requests."""
_TEXT_LAYER = re.compile(r"language_model.*\.layers\.(\d+)\.")
_LIKELY = {'"': 4.5, "}": 3.4, "]": 2.8, ",": 2.3, "<think>": 0.9}
"""Of the scripted model: what a grammar forces ends soon, since requests of calls have no max_tokens."""


def model_folder(name: str) -> Path:
    """Return the folder of the model that stands for `name` in this file's tests; a folder stands for itself."""
    if Path(name).is_dir():
        return Path(name)
    kinds: dict[str, str] = json.loads(os.environ[MODELS])
    return _made(kinds.get(name, kinds["*"]))


@cache
def _made(kind: str) -> Path:
    if kind == "small":
        return _small()
    folder = Path(tempfile.mkdtemp(prefix=f"{kind.replace(' ', '-')}-")) / kind
    _MAKERS[kind](folder)
    return folder


@cache
def _small() -> Path:
    return ensure_default_model(default_cache_dir(os.environ), lambda message: None)


def _make_scripted(folder: Path) -> None:
    make_scripted_model(folder, _small(), max_length=32_768, likely=_LIKELY)


def _make_tiny(folder: Path) -> None:
    make_scripted_model(folder, max_length=32_768)


def _make_images(folder: Path) -> None:
    make_chat_model(folder)
    _edit(folder / "config.json", lambda content: content["text_config"].update(max_position_embeddings=32_768))


def _make_deep_images(folder: Path) -> None:
    """Write a model of images that answers slowly: its last layer of text is repeated."""
    _make_images(folder)
    weights = load_file(folder / "model.safetensors")
    last = max(int(found[1]) for name in weights if (found := _TEXT_LAYER.search(name)))
    for name, values in [*weights.items()]:
        if (found := _TEXT_LAYER.search(name)) and int(found[1]) == last:
            before, after = name[: found.start(1)], name[found.end(1) :]
            weights |= {f"{before}{layer}{after}": values.clone() for layer in range(last + 1, _MANY_LAYERS)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _edit(folder / "config.json", lambda content: content["text_config"].update(num_hidden_layers=_MANY_LAYERS))


def _make_deep(folder: Path) -> None:
    """Write a model that answers slowly."""
    _make_random(folder, num_layers=_MANY_LAYERS)


def _make_random(folder: Path, num_layers: int = 2) -> None:
    """Write a Llama that never ends an answer, and whose id 0 is text."""
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=64, num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=32_768, bos_token_id=1, eos_token_id=_NO_END, pad_token_id=2,
    )  # fmt: skip
    _save(AutoModelForCausalLM, config, folder)
    _edit(folder / "tokenizer.json", lambda content: content["added_tokens"][0].update(special=False))


def _make_vectors(folder: Path) -> None:
    _save_bert(folder, 384)
    write_pooling(folder, "mean", normalize=True)


def _make_wide_vectors(folder: Path) -> None:
    _save_bert(folder, 768)
    write_pooling(folder, "mean", normalize=True)


def _make_classes(folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=2048, pad_token_id=2,
        id2label={0: "Default", 1: "Spoiled"}, label2id={"Default": 0, "Spoiled": 1},
    )  # fmt: skip
    _save(AutoModelForSequenceClassification, config, folder)


def _make_pairs(folder: Path) -> None:
    config = XLMRobertaConfig(
        vocab_size=_VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=514, type_vocab_size=1, pad_token_id=1, num_labels=1,
    )  # fmt: skip
    _save(AutoModelForSequenceClassification, config, folder)
    _edit(folder / "tokenizer.json", _mark_both_ends)


def _save_bert(folder: Path, hidden_size: int) -> None:
    config = BertConfig(
        vocab_size=_VOCABULARY, hidden_size=hidden_size, num_hidden_layers=2, num_attention_heads=12,
        intermediate_size=96, max_position_embeddings=514, pad_token_id=0,
    )  # fmt: skip
    _save(BertModel, config, folder)
    _edit(folder / "tokenizer.json", _mark_both_ends)


def _save(kind: Any, config: Any, folder: Path) -> None:
    folder.mkdir(parents=True)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        network = kind(config) if kind is BertModel else kind.from_config(config, dtype=torch.float32)
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.08)
    network.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(_small() / name, folder / name)


def _mark_both_ends(content: dict[str, Any]) -> None:
    first, last = ({"SpecialToken": {"id": token, "type_id": 0}} for token in ("<|im_start|>", "<|im_end|>"))
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, texts[0], last],
        "pair": [first, texts[0], last, texts[1], last],
        "special_tokens": {
            token: {"id": token, "ids": [number], "tokens": [token]}
            for token, number in (("<|im_start|>", 1), ("<|im_end|>", 2))
        },
    }


def _edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


_MAKERS: dict[str, Callable[[Path], None]] = {
    "scripted": _make_scripted,
    "tiny": _make_tiny,
    "images": _make_images,
    "deep images": _make_deep_images,
    "random": _make_random,
    "deep": _make_deep,
    "vectors": _make_vectors,
    "vectors768": _make_wide_vectors,
    "classes": _make_classes,
    "pairs": _make_pairs,
}
