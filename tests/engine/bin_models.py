"""Tiny checkpoints as they were published before safetensors: pytorch_model.bin, GPT-2's tokenizer in two files."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from engine.checkpoints.bin_files import BIN_INDEX, BIN_NAME
from tests.engine.tiny_models import EOS, make_tiny_model


def make_bin_model(folder: Path, kind: str = "opt", *, shards: int = 1, prefix: str | None = None) -> Path:
    """Save a random `kind` as .bin with its head stored too; `prefix` is removed from the names, as in some OPTs."""
    make_tiny_model(kind, folder)
    state: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    embeddings = next(name for name in state if name.endswith("embed_tokens.weight"))
    state.setdefault("lm_head.weight", state[embeddings])
    if prefix is not None:
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    save_bin(folder, state, shards=shards)
    split_tokenizer(folder)
    return folder


def save_bin(folder: Path, state: dict[str, Any], *, shards: int = 1) -> None:
    """Write the .bin files of `state`, with an index where there are several."""
    if shards == 1:
        torch.save(state, folder / BIN_NAME)
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"pytorch_model-{shard + 1:05}-of-{shards:05}.bin"
        part = {key: value for number, (key, value) in enumerate(state.items()) if number % shards == shard}
        torch.save(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / BIN_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def split_tokenizer(folder: Path) -> None:
    """Replace tokenizer.json by vocab.json and merges.txt, with OPT's settings, which add a BOS token."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    token = {"__type": "AddedToken", "content": EOS, **flags}
    settings = {
        "tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": False, "bos_token": token,
        "eos_token": token, "unk_token": token, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    old = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = old["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


class Marking:
    """When pickled, it becomes a call that creates a file in any process that unpickles it without checks."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._marker,)
