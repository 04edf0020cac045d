"""Tiny random encoders and classifiers as folders: BERT, XLM-RoBERTa with classes, decoders with classes."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    LlamaConfig,
    Qwen3Config,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

VOCABULARY = 120
TEXTS = [tuple((17 * i + 5 * j * j) % VOCABULARY for j in range(3 + 7 * i)) for i in range(6)]
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40,
}  # fmt: skip


def make_bert(folder: Path) -> Path:
    """Write a BertModel of at most 64 tokens; return its folder."""
    torch.manual_seed(11)
    model = BertModel(BertConfig(**_SIZES, max_position_embeddings=64, type_vocab_size=2, pad_token_id=0))
    _save(model, folder)
    return folder


def make_cross_encoder(folder: Path, *, num_labels: int = 1, **keys: Any) -> Path:
    """Write an XLM-RoBERTa with a head of `num_labels`, of at most 64 tokens; return its folder."""
    torch.manual_seed(12)
    config = XLMRobertaConfig(
        **_SIZES, max_position_embeddings=66, type_vocab_size=1, pad_token_id=1, num_labels=num_labels, **keys
    )
    model = XLMRobertaForSequenceClassification(config)
    with torch.no_grad():
        model.classifier.out_proj.weight.mul_(40)  # scores that differ
    _save(model, folder)
    return folder


def make_decoder_classifier(kind: str, folder: Path, *, num_labels: int, **keys: Any) -> Path:
    """Write a `kind` (llama or qwen3) with a head of `num_labels` for each token; return its folder."""
    torch.manual_seed(13)
    made = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind]
    config = made(
        **_SIZES, max_position_embeddings=64, num_key_value_heads=2, head_dim=6, num_labels=num_labels, **keys
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        model.score.weight.mul_(20)
    _save(model, folder)
    return folder


def write_pooling(folder: Path, mode: str, *, normalize: bool, max_length: int | None = None) -> None:
    """Write the files that sentence-transformers leaves beside a model."""
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] if normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken", "max": "max_tokens"}
    pooling = {f"pooling_mode_{name}": key == mode for key, name in modes.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 24} | pooling))
    if max_length is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))


def _save(model: Any, folder: Path) -> None:
    model.eval().save_pretrained(folder)
