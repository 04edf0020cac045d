"""Tiny random models with a vision tower, whole as a checkpoint, and what plain transformers makes of their images.

make_vision_model("llava", folder)    # names: VISION
"""

import functools
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.engine.tiny_families import randomise
from tests.engine.tiny_models import MAX_MODEL_LEN, SLIDING_WINDOW, VOCAB_SIZE, saved_files, write_files
from wire.types import PromptImage, PromptState, SamplingParams

IMAGE_TOKEN, BEFORE_IMAGE, AFTER_IMAGE, OTHER_TOKEN = range(VOCAB_SIZE - 1, VOCAB_SIZE - 5, -1)
_PATCH = 4  # pixels, of Qwen's towers
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
}  # fmt: skip
_CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 2, "image_size": 20, "patch_size": 5, "projection_dim": 32,
}  # fmt: skip
_SIGLIP: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 4, "vision_use_head": False,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_QWEN: dict[str, Any] = {
    "text_config": {**_TEXT, "rope_parameters": _ROPE}, "image_token_id": IMAGE_TOKEN, "video_token_id": OTHER_TOKEN,
    "vision_start_token_id": BEFORE_IMAGE, "vision_end_token_id": AFTER_IMAGE, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN_TOWER: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": _PATCH, "spatial_merge_size": 2}
VISION: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **_TEXT}, "vision_config": _CLIP, "image_token_id": IMAGE_TOKEN,
        "image_seq_length": 16,
    },
    "qwen2_vl": {**_QWEN, "vision_config": {**_QWEN_TOWER, "embed_dim": 32, "mlp_ratio": 2, "hidden_size": 64}},
    "qwen2_5_vl": {
        **_QWEN,
        "vision_config": {
            **_QWEN_TOWER, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    },
    "gemma3": {
        "text_config": {**_TEXT, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "vision_config": _SIGLIP, "mm_tokens_per_image": 16, "image_token_index": IMAGE_TOKEN,
        "boi_token_index": BEFORE_IMAGE, "eoi_token_index": AFTER_IMAGE, "eos_token_id": 2,
    },
}  # fmt: skip
"""What the config of each model type has."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One image as the processor passes it to the tower: its pixels, the tokens for it, and their grid."""

    pixels: torch.Tensor
    count: int
    grid: tuple[int, int, int]

    @property
    def digest(self) -> bytes:
        """A sha256 of the pixels."""
        return hashlib.sha256(self.pixels.numpy().tobytes()).digest()


def make_vision_model(name: str, directory: Path, *, seed: int = 0) -> Path:
    """Save a random model of VISION in `directory` with tokenizer and chat template; return `directory`."""
    return write_files(_files(name, seed), directory)


@functools.lru_cache(maxsize=8)
def _files(name: str, seed: int) -> Mapping[str, bytes]:
    config = CONFIG_MAPPING[name](**VISION[name])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        randomise(network)
    return saved_files(network)


def picture(name: str, seed: int) -> Picture:
    """Return a random image for a model of VISION."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if not name.startswith("qwen"):
            size = VISION[name]["vision_config"]["image_size"]
            return Picture(torch.randn(1, 3, size, size), 16, (1, 1, 16))
        height, width = ((3, 5), (5, 3), (2, 4))[seed % 3]  # in tokens of 2 x 2 patches
        return Picture(torch.randn(4 * height * width, 3 * 2 * _PATCH**2), height * width, (1, height, width))


def with_pictures(
    text: Sequence[int],
    pictures: Sequence[tuple[int, Picture]],
    name: str = "p",
    *,
    around: bool = False,
    **params: Any,
) -> PromptState:
    """Return the prompt whose images stand at these ascending places of the text; `around`: a token on either side."""
    ids, images, done = list[int](), list[PromptImage](), 0
    for place, one in pictures:
        ids += text[done:place]
        ids += [BEFORE_IMAGE] * around
        images.append(PromptImage(len(ids), one.count, one.digest, one.grid))
        ids += [IMAGE_TOKEN] * one.count + [AFTER_IMAGE] * around
        done = place
    ids += text[done:]
    settings = SamplingParams(**{"max_tokens": 10, "temperature": 0.0} | params)
    return PromptState(name, f"r-{name}", tuple(ids), settings, images=tuple(images))


def asked(name: str) -> list[tuple[PromptState, list[Picture]]]:
    """Return prompts with images first, in between, next to each other and last; with equal ids; and none."""
    one, other, third = (picture(name, seed) for seed in range(3))
    placed: list[tuple[int, list[tuple[int, Picture]]]] = [
        (20, [(0, one)]), (20, [(0, other)]), (31, [(4, one), (9, other)]), (31, [(4, one), (9, one)]),
        (12, [(5, other), (5, third), (12, one)]), (25, []),
    ]  # fmt: skip
    return [
        (
            with_pictures(text_ids(length, length), pictures, f"p{number}", around=name != "llava"),
            [one for _, one in pictures],
        )
        for number, (length, pictures) in enumerate(placed)
    ]


def text_ids(length: int, seed: int) -> list[int]:
    """Return random tokens of text."""
    numbers = random.Random(seed)
    return [numbers.randrange(3, VOCAB_SIZE - 20) for _ in range(length)]


class VisionOracle:
    """Plain transformers with its own tower, cache and positions, one prompt at a time."""

    def __init__(self, path: Path) -> None:
        self._kinds = {"llava": None, "gemma3": "token_type_ids"}.get(path.name, "mm_token_type_ids")
        self._network: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def embeddings(self, pictures: Sequence[Picture]) -> list[bytes]:
        """Return each image's embeddings, [count, hidden_size] float32."""
        made = []
        for one in pictures:
            features = self._network.get_image_features(**_tower_inputs([one])).pooler_output
            made.append(torch.cat(list(features)).reshape(one.count, -1).contiguous().numpy().tobytes())
        return made

    @torch.inference_mode()
    def generate(self, state: PromptState, pictures: Sequence[Picture]) -> list[int]:
        """Return the greedy continuation of a prompt."""
        ids = torch.tensor([list(state.token_ids)])
        config = GenerationConfig(
            max_new_tokens=state.params.max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        inputs = _tower_inputs(pictures) if pictures else {}
        if (kinds := self._kinds) is not None and pictures:
            inputs[kinds] = (ids == IMAGE_TOKEN).int()
        whole = self._network.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, **inputs
        )
        return [int(token) for token in whole[0, len(state.token_ids) :]]


def _tower_inputs(pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
    inputs = {"pixel_values": torch.cat([one.pixels for one in pictures])}
    if pictures[0].pixels.dim() == 2:  # patches, whose grid is passed beside them
        inputs["image_grid_thw"] = torch.tensor([(t, 2 * h, 2 * w) for t, h, w in (one.grid for one in pictures)])
    return inputs
