"""Tiny random models with a real tokenizer and chat template, made in a folder as a checkpoint would be.

make_tiny_model("llama", folder)    # kinds: KINDS
"""

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 320
MAX_MODEL_LEN = 512
SLIDING_WINDOW = 12
EOS = "<|im_end|>"
_SPECIAL = ["<|endoftext|>", "<|im_start|>", EOS]
_LINES = ["the quick brown fox jumps over the lazy dog", "what is the capital of France?", "hello, how are you?"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
    "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GQA: dict[str, Any] = {**_SIZES, "intermediate_size": 96, "num_key_value_heads": 2}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_GQA),
    "llama3": lambda: LlamaConfig(**_GQA, rope_parameters=_LLAMA3_ROPE),
    "qwen2": lambda: Qwen2Config(**_GQA),
    "qwen3": lambda: Qwen3Config(**_GQA, head_dim=16),
    "mistral": lambda: MistralConfig(**_GQA, sliding_window=None),
    "mistral-sliding": lambda: MistralConfig(**_GQA, sliding_window=SLIDING_WINDOW),
    "opt": lambda: OPTConfig(**_SIZES, ffn_dim=96, word_embed_proj_dim=64),
}
KINDS = tuple(_CONFIGS)
DISTINCT_KINDS = [
    kind if kind in ("llama", "qwen3", "mistral-sliding", "opt") else pytest.param(kind, marks=pytest.mark.long)
    for kind in KINDS
]
"""As a test's parameters where test_torch_model.py already runs all: plain, norms in attention, a window, no rope."""


def make_tiny_model(kind: str, directory: Path, *, seed: int = 0) -> Path:
    """Save a random `kind` (one of KINDS) in `directory` with tokenizer and chat template; return `directory`."""
    return write_files(_files(kind, seed), directory)


@functools.lru_cache(maxsize=16)
def _files(kind: str, seed: int) -> Mapping[str, bytes]:
    config = _CONFIGS[kind]()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.dim() > 1:  # the usual 0.02 makes logits so flat that greedy decoding repeats itself
                    parameter.normal_(std=0.15)
    return saved_files(network)


def saved_files(network: Any) -> Mapping[str, bytes]:
    """Return the files of a checkpoint of the network, with tokenizer and chat template, by name."""
    with tempfile.TemporaryDirectory() as folder:
        network.save_pretrained(folder)
        save_tiny_tokenizer(Path(folder))
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def write_files(files: Mapping[str, bytes], directory: Path) -> Path:
    """Write files by name into a folder that may not be there yet; return it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


@functools.cache
def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    return tokenizer


def save_tiny_tokenizer(directory: Path) -> None:
    """Write tokenizer.json (byte-level BPE of VOCAB_SIZE ids) and tokenizer_config.json with a chat template."""
    _tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": EOS,
        "pad_token": "<|endoftext|>",
        "chat_template": _CHAT_TEMPLATE,
        "model_max_length": MAX_MODEL_LEN,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
