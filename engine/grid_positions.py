"""The three positions of each token, in time, height and width, for models that rotate images by their grid. Pure.

    text   | one position, three times: the one after the text before, or `first` + the longer side of the image before
    image  | first + its place in time, height and width; `first` is the position after the text before it

These are Qwen2-VL's rules. An image's length in time does not move the positions after the image.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from wire.types import PromptImage


@dataclass(frozen=True, slots=True)
class _Placed:
    image: PromptImage
    first: int

    @property
    def end(self) -> int:
        return self.image.start + self.image.count

    @property
    def next_position(self) -> int:
        """Position of the first token after the image."""
        return self.first + max(self.image.grid[1:])


class GridPositions:
    """The positions of one prompt's tokens and outputs, derived from where its images are."""

    def __init__(self, images: Sequence[PromptImage]) -> None:
        self._placed: list[_Placed] = []
        for image in images:
            self._placed.append(_Placed(image, self._of_text(image.start, len(self._placed) - 1)))
        self._starts = [image.start for image in images]

    def of(self, start: int, count: int) -> "array[int]":
        """Return three numbers for each of the tokens [start, start + count)."""
        made = array("i")
        for index in range(start, start + count):
            made.extend(self._of_token(index))
        return made

    def _of_token(self, index: int) -> tuple[int, int, int]:
        before = bisect_right(self._starts, index) - 1
        if before < 0 or index >= self._placed[before].end:
            return (self._of_text(index, before),) * 3
        placed = self._placed[before]
        offset, (_, height, width), first = index - placed.image.start, placed.image.grid, placed.first
        return first + offset // (height * width), first + offset // width % height, first + offset % width

    def _of_text(self, index: int, before: int) -> int:
        """Return the position of a text token; `before` is the index of the last image before it, -1 without one."""
        if before < 0:
            return index
        placed = self._placed[before]
        return placed.next_position + index - placed.end


def positions_of_text(start: int, count: int) -> "array[int]":
    """Return three numbers for each of the tokens [start, start + count) of a prompt without images."""
    return array("i", [index for index in range(start, start + count) for _ in range(3)])
