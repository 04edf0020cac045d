"""Load the images of a conversation; models without vision refuse them.

A request's image bytes count against the server's limit until the answer ends.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.types import Scope

from scheduler.api.prepared_request import cache_salt_of
from scheduler.app_context import AppContext
from scheduler.images.image_limits import HeldImageBytes
from scheduler.images.image_part import Message, image_part, images_in
from scheduler.images.placeholders import ChatPrompt
from wire.errors import InvalidRequest

HELD = "held_image_bytes"
"""The key of a request's HeldImageBytes in the state of its scope."""


async def load_images(
    context: AppContext, request: Request, messages: Sequence[Message], salt: str | None = None, *,
    counts: bool = False,
) -> Sequence[Message]:  # fmt: skip
    """Return the conversation with its images loaded; `salt` is the body's cache_salt.

    `counts`: the route needs the number of image tokens. Raises Overloaded, Unavailable, or an InvalidRequest
    that names the part.
    """
    path, images = next((image.path for image in images_in(messages)), None), context.images
    if path is None:
        return messages
    model = context.config.engine.served_names()[0]
    if images is None or (images.vision is None and not images.has_workers()):
        raise InvalidRequest(f"{path} is an image, but the model {model} takes text only", path)
    if images.vision is None and counts:
        raise InvalidRequest(f"{path}: only the workers of {model} know how many tokens an image has", path)
    state = request.scope["state"]
    held = state.setdefault(HELD, HeldImageBytes(images.budget))
    return await images.load(messages, held, cache_salt_of(context, str(state.get("tenant", "")), salt))


async def image_prompt(
    context: AppContext, request: Request, prompt: Any, data: Any, *, add_special_tokens: bool,
    salt: str | None = None,
) -> ChatPrompt:  # fmt: skip
    """Return the ids of a text whose placeholders stand for the images of `multi_modal_data`, and these images.

    Raises as `load_images` does, and InvalidRequest for data other than `image`, or a prompt that is not one text.
    """
    urls = data.get("image") if isinstance(data, Mapping) and set(data) == {"image"} else None
    if not isinstance(urls, list) or not urls:
        raise InvalidRequest('multi_modal_data must be {"image": [URL, ...]}', "multi_modal_data")
    if not isinstance(prompt, str):
        raise InvalidRequest("multi_modal_data needs a prompt that is one text", "prompt")
    fields = [f"multi_modal_data.image.{index}" for index in range(len(urls))]
    content = [image_part(url, field, field) for url, field in zip(urls, fields, strict=True)]
    loaded = await load_images(context, request, [{"role": "user", "content": content}], salt, counts=True)
    request.scope["state"]["image_paths"] = {f"images.{index}": field for index, field in enumerate(fields)}
    return await context.tokens.text_prompt(
        prompt, list(images_in(loaded)), add_special_tokens=add_special_tokens
    )  # fmt: skip


def release_images(scope: Scope) -> None:
    """Release the bytes of a request's images. Idempotent."""
    held: HeldImageBytes | None = scope["state"].pop(HELD, None)
    if held is not None:
        held.release()
