"""The prompt that a fake worker makes of a conversation: one token for each character, and some for each image."""

import base64
import binascii
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from testing.vllm_worker.bad_request import BadRequest

PLACEHOLDER = 9
TOKENS_OF_IMAGE = 20
_BEGIN, _FIRST, _NUM_CHARS = 8, 10, 240
_RENDERED = ("tools", "documents", "chat_template_kwargs")
"""What templates read besides the messages."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Token ids, and the marks of the images, by position: equal ids of different images have different KV."""

    token_ids: tuple[int, ...]
    marks: Mapping[int, int]


def render_chat(body: Mapping[str, Any], *, takes_images: bool) -> RenderedChat:
    """Return the prompt of a body's messages. Raises BadRequest."""
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise BadRequest("messages must be a list of messages", param="messages")
    ids, marks = list[int](), dict[int, int]()
    for message in body["messages"]:
        ids += [_BEGIN, *_characters(message["role"])]
        for part in _parts(message):
            if isinstance(part, str):
                ids += _characters(part)
                continue
            if not takes_images:
                raise BadRequest("model is not a multimodal model")
            marks |= dict.fromkeys(range(len(ids), len(ids) + TOKENS_OF_IMAGE), 1 + zlib.crc32(part) % 2**15)
            ids += [PLACEHOLDER] * TOKENS_OF_IMAGE
    for name in _RENDERED:
        ids += _characters(json.dumps(body[name])) if body.get(name) else []
    return RenderedChat((*ids, _BEGIN) if body.get("add_generation_prompt", True) else tuple(ids), marks)


def _parts(message: Mapping[str, Any]) -> Iterator[str | bytes]:
    """Yield the texts and the image files of a message. Raises BadRequest."""
    content: Any = message.get("content") or ""
    parts: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for part in parts:
        yield part["text"] if part["type"] == "text" else _file(part["image_url"]["url"])
    if message.get("tool_calls"):
        if any("id" not in call for call in message["tool_calls"]):
            raise BadRequest("tool_calls.id: Field required")
        yield json.dumps(message["tool_calls"])


def _file(url: str) -> bytes:
    """Return the file of a data URL; vLLM would also fetch other URLs."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise BadRequest(f"this worker fetches no image: {url[:80]}", status=422, param="image_url")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise BadRequest(f"Failed to load image: {error}", param="image_url") from None


def _characters(text: str) -> list[int]:
    return [_FIRST + ord(one) % _NUM_CHARS for one in text]
