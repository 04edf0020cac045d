"""SentencePiece vocabularies of GGUF files against transformers' own tokenizer and its way from scores to merges.

Compared with the sentencepiece package once, over the words of these docs: no line differed.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaTokenizer
from transformers.convert_slow_tokenizer import generate_merges

from engine.checkpoints.gguf_sentencepiece import sentencepiece_bpe
from engine.checkpoints.gguf_tokenizer import check_tokenizer, write_tokenizer

_SPECIAL = ["<unk>", "<s>", "</s>"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_LINES = ["the quick brown fox jumps over the lazy dog", "what is the capital of France?", "hello, how are you?"] * 3
_TEXTS = [
    "hello, the quick brown fox",
    "  two  spaces and one at the end ",
    "what? 12345 THE, naïve",
    "日本語 🎉 café",
    "",
    " ",
    "\tthe\nlazy dogs",
]


@pytest.fixture(scope="module")
def fields() -> dict[str, Any]:
    """A vocabulary as SentencePiece trains it: special, bytes, joint tokens by score, then characters."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(_LINES, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    vocab = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    joint, single = [t for t in vocab if len(t) > 1], [t for t in vocab if len(t) == 1]
    normal = [*joint, *single]
    return {
        "general.architecture": "llama",
        "llama.context_length": 512,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*_SPECIAL, *_BYTES, *normal],
        "tokenizer.ggml.scores": [0.0] * (3 + 256) + [-float(i) for i in range(len(normal))],
        "tokenizer.ggml.token_type": [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, *[_NORMAL] * len(normal)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_text_is_joined_as_transformers_does(fields: dict[str, Any]) -> None:
    vocab = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    scores = dict(zip(vocab, fields["tokenizer.ggml.scores"], strict=True))
    theirs = LlamaTokenizer(vocab, generate_merges(vocab, scores, skip_tokens=[*_SPECIAL, *_BYTES])).backend_tokenizer

    ours = sentencepiece_bpe(fields)

    for text in _TEXTS:
        ids = ours.encode(text).ids
        # transformers puts no space before one that is there; sentencepiece does, as `ours` must
        if not text.startswith(" "):
            assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids) == text, text
    assert ours.encode("  the").tokens == [*theirs.encode("  ", add_special_tokens=False).tokens, "▁the"]


def test_no_leading_space_is_added_if_the_file_forbids_it(fields: dict[str, Any]) -> None:
    ours = sentencepiece_bpe(fields | {"tokenizer.ggml.add_space_prefix": False})

    assert ours.encode("hello").tokens[0][0] == "h"
    assert ours.decode(ours.encode(" hello").ids) == " hello"


def test_special_tokens_are_separate_and_text_begins_with_bos(fields: dict[str, Any], tmp_path: Path) -> None:
    check_tokenizer(fields)
    write_tokenizer(fields, tmp_path)

    written = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert written.encode("<s>the fox</s>").ids[0] == 1
    assert written.encode("<s>the fox</s>").ids[-1] == 2
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["unk_token"], settings["add_bos_token"]) == ("<s>", "<unk>", True)
