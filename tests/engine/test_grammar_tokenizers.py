"""Grammars over other tokenizers: bytes as a fallback, marked blanks, and the default model's own."""

import json
import os
import random
import re
from pathlib import Path

import jsonschema
import pytest
from tokenizers import Tokenizer, decoders, models

from engine.checkpoints.default_model import ensure_default_model
from engine.grammar.interface import Grammar
from engine.grammar.tokenizer_file import TokenizerFile
from pdserve.run_folder import default_cache_dir
from tests.engine.grammar_tools import allowed_ids, compiled
from wire.errors import InvalidGrammar
from wire.types import StructuredOutput

_PIECES = ["▁", "▁the", "▁é", "a", "b", "ab", "{", "}", '"', '":', "▁{", ",", "1", "日"]


@pytest.fixture(scope="module")
def sentencepiece_like(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFile:
    """Return a tokenizer as Llama 2 and Gemma have: a mark for blanks, and a token for each byte."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    tokenizer = Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return TokenizerFile(str(path), (2,), len(names))


@pytest.fixture(scope="module")
def default_model() -> TokenizerFile:
    """Return the default model's tokenizer, for logits that are as wide."""
    folder = ensure_default_model(default_cache_dir(os.environ), lambda words: None)
    return TokenizerFile(str(folder / "tokenizer.json"), (2,), 49152)


def _random_text(tokenizer: TokenizerFile, grammar: Grammar, seed: int) -> str:
    """Return a whole text of uniformly chosen tokens."""
    matcher, chooser = grammar.matcher(), random.Random(seed)
    ids: list[int] = []
    while True:
        allowed = sorted(allowed_ids(matcher, tokenizer.vocab_size))
        token_id = chooser.choice(allowed)
        assert matcher.advance(token_id)
        if token_id in tokenizer.eos_token_ids:
            return str(Tokenizer.from_file(tokenizer.path).decode(ids))
        ids.append(token_id)
        assert len(ids) < 500


def test_bytes_and_marked_blanks_make_up_text(sentencepiece_like: TokenizerFile) -> None:
    pattern = r"(a|日|é){1,4}( the)? é\{"
    grammar = compiled(sentencepiece_like, StructuredOutput("regex", pattern))

    for seed in range(30):
        assert re.fullmatch(pattern, _random_text(sentencepiece_like, grammar, seed))


def test_tokens_without_bytes_of_their_own_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    with pytest.raises(InvalidGrammar, match="not possible with this model's tokenizer"):
        compiled(TokenizerFile(str(tmp_path / "tokenizer.json"), (0,), 3), StructuredOutput("regex", "a"))


@pytest.mark.long
def test_the_default_models_tokenizer_writes_json_of_a_schema(default_model: TokenizerFile) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-zéß日 ]{0,12}$"},
            "sizes": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 500}, "maxItems": 3},
        },
        "required": ["name", "sizes"],
        "additionalProperties": False,
    }
    grammar = compiled(default_model, StructuredOutput("json", json.dumps(schema)))

    for seed in range(50):
        jsonschema.validate(json.loads(_random_text(default_model, grammar, seed)), schema)


@pytest.mark.long
@pytest.mark.parametrize("pattern", ["(.{0,1000}){0,1000}", "(([a-z]{0,100}){0,100}){0,100}b"])
def test_counts_within_counts_are_refused_over_a_large_vocabulary(default_model: TokenizerFile, pattern: str) -> None:
    with pytest.raises(InvalidGrammar, match="too many expressions"):
        compiled(default_model, StructuredOutput("regex", pattern))
