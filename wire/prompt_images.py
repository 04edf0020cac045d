"""The images of a prompt: their limits, and the marks that distinguish equal token ids of different images. Pure."""

from collections.abc import Sequence
from math import prod

from wire.errors import InvalidRequest
from wire.kv_layout import ITEM_BYTES
from wire.parameter_rules import MAX_COUNT
from wire.types import PromptImage, PromptState

MAX_IMAGES = 1024  # of a prompt; the scheduler's own limit is lower
MAX_IMAGE_BYTES = 32 * 2**20
"""The limit for all image files of one prompt together."""
DIGEST_BYTES = 32


def check_images(state: PromptState) -> None:
    """Raise InvalidRequest, with the value and the limit, for images that no prompt may have."""
    images = state.images
    if len(images) > MAX_IMAGES:
        raise InvalidRequest(f"a prompt has {len(images)} images, but the limit is {MAX_IMAGES}", "images")
    if (size := num_data_bytes(images)) > MAX_IMAGE_BYTES:
        raise InvalidRequest(f"the images have {size} bytes, but the limit is {MAX_IMAGE_BYTES}", "images")
    if state.pooling is not None:
        raise InvalidRequest("pooling of a prompt with images is not available", "images")
    free = 0
    for index, image in enumerate(images):
        _check_image(f"image {index}", image, free, len(state.token_ids))
        free = image.start + image.count


def num_data_bytes(images: Sequence[PromptImage]) -> int:
    """Return the size of the images' files."""
    return sum(len(image.data) for image in images)


def marks_within(images: Sequence[PromptImage], start: int, end: int) -> bytes:
    """Return where each image among the tokens [start, end) begins, and its digest; empty if there is none."""
    within = (image for image in images if image.start < end and start < image.start + image.count)
    return b"".join(image.start.to_bytes(8, "little") + image.digest for image in within)


def _check_image(name: str, image: PromptImage, free: int, num_tokens: int) -> None:
    end = image.start + image.count
    if image.count < 1 or not free <= image.start < end <= num_tokens:
        where = f"but must have at least one token, all within [{free}, {num_tokens})"
        raise InvalidRequest(f"{name} has the tokens [{image.start}, {end}), {where}", "images")
    if len(image.digest) != DIGEST_BYTES:
        raise InvalidRequest(f"{name} has a digest of {len(image.digest)} bytes instead of {DIGEST_BYTES}", "images")
    if image.dtype and image.dtype not in ITEM_BYTES:
        known = ", ".join(ITEM_BYTES)
        raise InvalidRequest(f"{name} has embeddings of type {image.dtype[:40]!r}; known types: {known}", "images")
    if min(image.grid) < 1 or max(image.grid) > MAX_COUNT or prod(image.grid) != image.count:
        raise InvalidRequest(f"{name} has {image.count} tokens, but a grid of {image.grid}", "images")
