"""Images whose tokens attend to each other both ways: no chunk may end inside one. Pure."""

from collections.abc import Sequence

from wire.types import PromptImage

Span = tuple[int, int]
"""Tokens [start, end) of one image."""


def spans_of(images: Sequence[PromptImage]) -> tuple[Span, ...]:
    """Return the tokens of each image."""
    return tuple((image.start, image.start + image.count) for image in images)


def spans_within(spans: Sequence[Span], start: int, count: int) -> tuple[Span, ...]:
    """Return the images among the tokens [start, start + count)."""
    return tuple((first, end) for first, end in spans if first < start + count and start < end)


def whole_count(spans: Sequence[Span], start: int, count: int) -> int:
    """Return the length of the longest chunk from `start` on that has at most `count` tokens and ends inside no image.

    A chunk that ends inside the image at its beginning becomes longer instead: a limit must not block an image.
    """
    for first, end in spans:
        if count and first < start + count < end:
            return first - start if first > start else end - start
    return count
