"""Images of a script as data URLs: PIL images in prompts and in parts of chats. Pillow is imported when needed."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any


def prompt_images(index: int, given: Any) -> tuple[str, ...]:
    """Return the data URLs of `multi_modal_data`, which has one image or a list. Raises TypeError or ValueError."""
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise TypeError(f"prompt {index}: multi_modal_data is {kind}, but must be a dict with the key image")
    others = sorted(set(given) - {"image"})
    if others:
        raise ValueError(f"prompt {index}: multi_modal_data has {', '.join(map(str, others))}: only image is served")
    images = given.get("image")
    many = images if isinstance(images, list | tuple) else [] if images is None else [images]
    return tuple(_data_url(f"prompt {index}: multi_modal_data.image {at}", one) for at, one in enumerate(many))


def with_data_urls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation whose parts of type `image_pil` are `image_url`s. Raises TypeError."""
    return [
        {**message, "content": [_part(part) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping) or "image_pil" not in part:
        return part
    return {"type": "image_url", "image_url": {"url": _data_url("image_pil", part["image_pil"])}}


def _data_url(name: str, image: Any) -> str:
    """Return the pixels as a PNG, converted to RGB as on the server."""
    from PIL import Image

    if not isinstance(image, Image.Image):
        raise TypeError(f"{name} is {type(image).__name__}, but must be a PIL image")
    plain, out = image.convert("RGB"), io.BytesIO()
    plain.info = {}  # drop the file's orientation: the script sees the pixels unrotated
    plain.save(out, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
