"""The vision models that benchmarks measure: LLaVA with random weights, by the shapes of published checkpoints.

python -P benchmarks/vision/shapes.py 400m FOLDER
"""

import io
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, LlavaConfig

IMAGE = "<image>"
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class VisionShape:
    """A SigLIP tower before a Qwen2: layers, hidden size, intermediate size and heads of each."""

    tower: tuple[int, int, int, int]
    side: int
    patch: int
    text: tuple[int, int, int, int]
    vocab_size: int

    @property
    def image_tokens(self) -> int:
        """Tokens of each image."""
        return (self.side // self.patch) ** 2

    def config(self) -> LlavaConfig:
        """Return transformers' config."""
        return LlavaConfig(
            vision_config={
                "model_type": "siglip_vision_model", **_network(self.tower), "image_size": self.side,
                "patch_size": self.patch, "vision_use_head": False,
            },
            text_config={
                "model_type": "qwen2", **_network(self.text), "num_key_value_heads": self.text[3],
                "vocab_size": self.vocab_size, "max_position_embeddings": 32_768, "bos_token_id": 1,
                "eos_token_id": 2, "tie_word_embeddings": True,
            },
            image_token_index=self.vocab_size - 1, image_seq_length=self.image_tokens,
            vision_feature_select_strategy="full", vision_feature_layer=-1, tie_word_embeddings=True,
        )  # fmt: skip


SHAPES = {
    "400m": VisionShape((27, 1152, 4304, 16), 384, 14, (24, 1024, 2816, 16), 151_936),
    "small": VisionShape((6, 384, 1536, 6), 384, 14, (6, 384, 1024, 6), 2048),
    "tiny": VisionShape((2, 32, 64, 2), 56, 14, (2, 64, 96, 4), 512),
}
"""`400m`: the so400m tower of SigLIP before the text network of Qwen1.5-0.5B, as in llava-interleave-qwen-0.5b."""


def write_vision_model(shape: VisionShape, folder: Path) -> None:
    """Write a model: random weights in bfloat16, a tokenizer with one word for each id, a template for chats."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network: Any = AutoModelForImageTextToText.from_config(shape.config(), dtype=torch.bfloat16)
    network.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(shape.vocab_size - 1)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    size = {"height": shape.side, "width": shape.side}
    processor = {"image_processor_type": "SiglipImageProcessor", "size": size}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")


def png(side: int, seed: int) -> bytes:
    """Return a PNG of `side` x `side` smooth random pixels; its file is about as large as that of a photograph."""
    small = Image.frombytes("RGB", (64, 64), random.Random(seed).randbytes(3 * 64 * 64))
    out = io.BytesIO()
    small.resize((side, side), Image.Resampling.BICUBIC).save(out, "PNG", compress_level=1)
    return out.getvalue()


def _network(numbers: tuple[int, int, int, int]) -> dict[str, int]:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    return dict(zip(names, numbers, strict=True))


if __name__ == "__main__":
    write_vision_model(SHAPES[sys.argv[1]], Path(sys.argv[2]))
