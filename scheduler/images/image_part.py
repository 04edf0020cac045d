"""Images as parts of a conversation: as sent, then loaded, and as bare placeholders for templates. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wire.errors import InvalidRequest

Message = Mapping[str, Any]
MAX_UUID_CHARS = 256
DETAILS = ("auto", "low", "high", "original")
"""Values of `detail`. The model's own image processor decides the resolution, as in vLLM."""


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image as sent: a URL, embeddings, or neither if only the `uuid` of an earlier image was sent.

    `path` is its part's JSON path; `embeds` is the value of `image_embeds`, not yet checked. `detail` is "" if unset.
    """

    url: str
    path: str
    uuid: str = ""
    embeds: Any = None
    detail: str = ""

    @property
    def is_named(self) -> bool:
        """Whether only its uuid was sent."""
        return not self.url and self.embeds is None


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """An image whose header was read: its file, the number and grid of its tokens in a prompt, and its digest.

    With `dtype`, `data` are its embeddings, values of this type. An image without a `digest` cannot be encoded by
    pdserve's own instances, and its `count` is unknown.
    """

    data: bytes
    count: int
    grid: tuple[int, int, int]
    digest: bytes
    path: str
    dtype: str = ""
    media_type: str = ""
    detail: str = ""


def read_image_part(part: Message, path: str) -> dict[str, Any]:
    """Convert an `image_url` part to a part of our conversations. Raises InvalidRequest."""
    named, uuid = part.get("image_url") or {}, _uuid(part, path)
    if not isinstance(named, Mapping):
        raise InvalidRequest(f"{path}.image_url must be an object with a url", path)
    url, detail = named.get("url"), named.get("detail")
    if detail is not None and detail not in DETAILS:
        where = f"{path}.image_url.detail"
        raise InvalidRequest(f"{where} is {str(detail)[:40]!r}, but must be one of {', '.join(DETAILS)}", where)
    if not named and uuid:
        return {"type": "image", "image": ImagePart("", path, uuid)}
    return image_part(url, path, f"{path}.image_url.url", uuid, detail or "")


def read_embeds_part(part: Message, path: str) -> dict[str, Any]:
    """Convert an `image_embeds` part to a part of our conversations. Raises InvalidRequest."""
    given, uuid = part.get("image_embeds"), _uuid(part, path)
    if given is None and not uuid:
        raise InvalidRequest(f"{path}.image_embeds must have embeddings, or be null next to a uuid", path)
    return {"type": "image", "image": ImagePart("", path, uuid, given)}


def image_part(url: Any, path: str, field: str, uuid: str = "", detail: str = "") -> dict[str, Any]:
    """Return the part for the image at `url`, the value of the body's `field`. Raises InvalidRequest."""
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"{field} must be a data:, https:, http: or file: URL", path)
    return {"type": "image", "image": ImagePart(url, path, uuid, detail=detail)}


def _uuid(part: Message, path: str) -> str:
    uuid = part.get("uuid") or ""
    if not isinstance(uuid, str) or len(uuid) > MAX_UUID_CHARS:
        raise InvalidRequest(f"{path}.uuid must be a text of at most {MAX_UUID_CHARS} characters", path)
    return uuid


def images_in(messages: Sequence[Message]) -> Iterator[Any]:
    """Yield the ImageParts or LoadedImages of a conversation, in order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part["image"] for part in content if "image" in part)


def with_images(messages: Sequence[Message], images: Sequence[LoadedImage]) -> list[Message]:
    """Return the conversation with its images replaced by these, in order."""
    left = iter(images)
    return [_converted(message, lambda part: part | {"image": next(left)}) for message in messages]


def without_images(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with parts as templates expect them: `{"type": "image"}`."""
    return [_converted(message, lambda _: {"type": "image"}) for message in messages]


def _converted(message: Message, convert: Any) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [convert(part) if "image" in part else part for part in content]}
