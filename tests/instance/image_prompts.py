"""Prompts with image files for tiny vision models, and what plain transformers generates with its own processor.

model = make_image_model("llava", folder)
state = model.prompt("p", [*range(3, 20)], {4: file})       # the image stands before the text's token 4
model.generate(state)                                       # by transformers alone
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, GenerationConfig

from engine.vision.tower import VisionTower
from images.checkpoint import VisionCheckpoint, read_vision
from images.digest import image_digest
from images.image_file import decode, read_header
from tests.engine.tiny_vision_models import AFTER_IMAGE, BEFORE_IMAGE, make_vision_model
from tests.images.tiny_processors import write_processor
from tests.images.tiny_tokens import add_image_tokens
from wire.types import PromptImage, PromptState, SamplingParams

_KINDS = {"llava": None, "gemma3": "token_type_ids", "qwen2_vl": "mm_token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}
"""The input by which transformers recognises tokens of images."""


@dataclass(frozen=True, slots=True)
class ImageModel:
    """A tiny model of a family in `folder`, with its tower."""

    folder: Path
    vision: VisionCheckpoint
    network: Any

    def prompt(self, name: str, text: Sequence[int], files: Mapping[int, bytes], **params: Any) -> PromptState:
        """Return a prompt whose images stand before these places of the text, as the scheduler makes it."""
        family, ids, images = self.vision.family, list[int](), list[PromptImage]()
        for place in range(len(text) + 1):
            if (data := files.get(place)) is not None:
                header = read_header(data)
                tokens = family.tokens(header.width, header.height)
                around = family.model_type.startswith("qwen")  # whose template writes a token on either side
                ids += [BEFORE_IMAGE] * around
                start = len(ids) + len(family.begin_ids)
                ids += [*family.ids(tokens.count), *[AFTER_IMAGE] * around]
                digest = image_digest(data, settings_digest=self.vision.settings_digest, model="tiny", cache_salt="")
                images.append(PromptImage(start, tokens.count, digest, tokens.grid, data))
            ids += text[place : place + 1]
        settings = SamplingParams(**{"max_tokens": 10, "temperature": 0.0} | params)
        return PromptState(name, f"r-{name}", tuple(ids), settings, images=tuple(images))

    def embedded(self, state: PromptState, name: str) -> PromptState:
        """Return the prompt under another name, with the tower's embeddings in place of its files."""
        images = tuple(
            replace(image, data=self.embeddings(image.data), digest=bytes(31) + bytes([at]), dtype="float32")
            for at, image in enumerate(state.images, 1)
        )
        return replace(state, prompt_id=name, request_id=f"r-{name}", images=images)

    def embeddings(self, data: bytes) -> bytes:
        """Return the embeddings of a file in float32."""
        return VisionTower(self.folder, "float32", "cpu").encode(data).values

    @torch.inference_mode()
    def generate(self, state: PromptState) -> list[int]:
        """Return transformers' greedy continuation, from the image files by its own processor."""
        inputs: dict[str, Any] = {}
        if state.images:
            processor = AutoImageProcessor.from_pretrained(self.folder, backend="pil")
            inputs = dict(processor([decode(image.data) for image in state.images], return_tensors="pt"))
            inputs.pop("num_crops", None)
        ids = torch.tensor([list(state.token_ids)])
        if state.images and (kinds := _KINDS[self.vision.family.model_type]) is not None:
            inputs[kinds] = (ids == self.vision.family.token_id).int()
        length = GenerationConfig(
            max_new_tokens=state.params.max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        whole = self.network.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=length, **inputs
        )
        return [int(token) for token in whole[0, len(state.token_ids) :]]

    def continued(self, prompt: Sequence[int], files: Sequence[bytes], max_tokens: int) -> list[int]:
        """Return transformers' greedy continuation of a LLaVA prompt with these images, one run of tokens each."""
        places = [at for at, token in enumerate(prompt) if token == self.vision.family.token_id]
        count = self.vision.family.tokens(1, 1).count
        assert len(places) == count * len(files)
        images = tuple(
            PromptImage(start, count, bytes(32), (1, 1, count), data)
            for start, data in zip(places[::count], files, strict=True)
        )
        settings = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return self.generate(PromptState("p", "r", tuple(prompt), settings, images=images))


def make_image_model(name: str, folder: Path) -> ImageModel:
    """Save a tiny random model of a family, with the settings of its image processor, in `folder`."""
    write_processor(name, make_vision_model(name, folder))
    vision = read_vision(folder)
    assert vision is not None
    network = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return ImageModel(folder, vision, network)


def make_chat_model(folder: Path) -> ImageModel:
    """Save a tiny LLaVA whose tokenizer has the tokens of images."""
    made = make_image_model("llava", folder)
    add_image_tokens(folder)
    return made


def without_files(state: PromptState) -> PromptState:
    """Return the prompt as a decode instance gets it."""
    return replace(state, images=tuple(replace(image, data=b"") for image in state.images))
