"""The special tokens of images in the tokenizers of tests/engine/tiny_vision_models.py."""

import json
from pathlib import Path

from tests.engine.tiny_vision_models import AFTER_IMAGE, BEFORE_IMAGE, IMAGE_TOKEN


def add_image_tokens(folder: Path) -> None:
    """Make the tokens around and of images special ones, in place of the last ones that the tokenizer learned."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab, flags = tokenizer["model"]["vocab"], dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    named = {AFTER_IMAGE: "<image_end>", BEFORE_IMAGE: "<image_start>", IMAGE_TOKEN: "<image>"}
    for replaced in [text for text, token_id in vocab.items() if token_id in named]:
        token_id = vocab.pop(replaced)
        tokenizer["added_tokens"].append({"id": token_id, "content": named[token_id], "special": True} | flags)
        tokenizer["model"]["merges"] = [pair for pair in tokenizer["model"]["merges"] if "".join(pair) != replaced]
    path.write_text(json.dumps(tokenizer))
