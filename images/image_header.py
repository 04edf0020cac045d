"""What the header of an image file says. Pure: without Pillow, which the scheduler does not load."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The contents of a file's header; the size is the one after orientation."""

    format: str
    width: int
    height: int
