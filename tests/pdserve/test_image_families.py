"""Chats with images over the HTTP API, in one process: each family's tokens are those of plain transformers."""

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from flags.options import EngineOptions
from images.image_file import read_header
from pdserve.inner_app import inner_app
from scheduler.config import SchedulerOptions
from tests.engine.tiny_vision_models import IMAGE_TOKEN
from tests.images.image_files import file_of, image_of
from tests.images.tiny_processors import PROCESSORS
from tests.images.tiny_tokens import add_image_tokens
from tests.instance.image_prompts import ImageModel, make_image_model
from wire.types import PromptImage, PromptState, SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.long]

WAIT_S, NUM_TOKENS = 300.0, 8
WIDE, TALL = file_of(image_of(40, 20)), file_of(image_of(17, 41, seed=2), "JPEG")


@pytest.fixture(params=PROCESSORS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ImageModel:
    """A tiny model of each family, with the tokens of images in its tokenizer."""
    made = make_image_model(request.param, tmp_path / request.param)
    add_image_tokens(made.folder)
    return made


def _messages(parts: Sequence[str | bytes], embeds_of: ImageModel | None = None) -> list[dict[str, Any]]:
    """Return a conversation of one message, whose images are files, or what the tower of a model makes of them."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        elif embeds_of is not None:
            content.append({"type": "image_embeds", "image_embeds": _embeds(embeds_of, part)})
        else:
            url = f"data:image/any;base64,{base64.b64encode(part).decode()}"
            content.append({"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": content}]


def _embeds(model: ImageModel, file: bytes) -> dict[str, Any]:
    header, values = read_header(file), model.embeddings(file)
    tokens = model.vision.family.tokens(header.width, header.height)
    grid = {"grid": tokens.grid} if model.folder.name.startswith("qwen") else {}
    shape = [tokens.count, model.vision.hidden_size]
    return {"data": base64.b64encode(values).decode(), "dtype": "float32", "shape": shape} | grid


def _expected(model: ImageModel, prompt: list[int], files: list[bytes]) -> list[int]:
    """Return transformers' continuation; the image tokens of the prompt must be those of the files, in order."""
    images, at = list[PromptImage](), 0
    for data in files:
        header = read_header(data)
        tokens = model.vision.family.tokens(header.width, header.height)
        at = prompt.index(IMAGE_TOKEN, at)
        assert prompt[at : at + tokens.count] == [IMAGE_TOKEN] * tokens.count
        images.append(PromptImage(at, tokens.count, bytes(32), tokens.grid, data))
        at += tokens.count
    assert IMAGE_TOKEN not in prompt[at:]
    settings = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    return model.generate(PromptState("p", "r", tuple(prompt), settings, images=tuple(images)))


@pytest.mark.covers("B.images.14")
async def test_chats_with_images_answer_as_transformers(model: ImageModel) -> None:
    engine = EngineOptions(
        model=str(model.folder), dtype="float32", served_model_name=("tiny",), kv_cache_memory=8 << 20, device="cpu",
        prefill_chunk_size=16,
    )  # fmt: skip
    chats: list[tuple[str | bytes, ...]] = [
        ("what is this?", WIDE), (TALL, "and", WIDE, "?"), ("two", WIDE, WIDE), ("only text",),
    ]  # fmt: skip
    settings = {"model": "tiny", "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    async with (
        asyncio.timeout(WAIT_S),
        inner_app(engine, SchedulerOptions(enable_mm_embeds=True)) as app,
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://inner", timeout=WAIT_S) as client,
    ):
        bodies = [
            settings | {"messages": _messages(parts, embeds_of), "return_token_ids": True}
            for embeds_of in (None, model) for parts in chats
        ]  # fmt: skip
        answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))

    for parts, answer in zip(chats * 2, answers, strict=True):
        assert answer.status_code == 200, answer.text
        files = [part for part in parts if isinstance(part, bytes)]
        assert answer.json()["choices"][0]["token_ids"] == _expected(model, answer.json()["prompt_token_ids"], files)
