"""The rule of Qwen2-VL: an image keeps about its size and shape, rounded to whole squares of merged patches. Pure.

Source: the image processor of Qwen2-VL (preprocessor_config.json: min_pixels, max_pixels, patch_size, merge_size).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from images.token_count import ImageTokens
from wire.errors import ConfigError, InvalidRequest

_MAX_ASPECT = 200
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280  # the processor's own defaults


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """One token stands for a square of `side` pixels of the resized image, which has min_pixels to max_pixels."""

    has_grid: ClassVar[bool] = True
    side: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def of(cls, processor: Mapping[str, Any], patch: int, merge: int) -> "PatchGrid":
        """Read the limits of an image processor. Raises ConfigError for invalid ones."""
        size = processor.get("size") or {"shortest_edge": _MIN_PIXELS, "longest_edge": _MAX_PIXELS}
        least = processor.get("min_pixels") or size.get("shortest_edge")
        most = processor.get("max_pixels") or size.get("longest_edge")
        side = patch * merge
        if not isinstance(least, int) or not isinstance(most, int) or not side or not 0 < least <= most:
            raise ConfigError(f"the image processor has invalid limits: {least} to {most} pixels, in squares of {side}")
        return cls(side, least, most)

    @property
    def max_tokens(self) -> int:
        """The tokens of the largest image."""
        return self.max_pixels // self.side**2

    def tokens(self, width: int, height: int) -> ImageTokens:
        """Return the tokens of an image of this size. Raises InvalidRequest for one that is too narrow."""
        aspect = max(width, height) / min(width, height)
        if aspect > _MAX_ASPECT:
            raise InvalidRequest(
                f"an image of {width} x {height} pixels: its aspect ratio is {aspect:g}, but the limit is {_MAX_ASPECT}"
            )
        rows, columns = self._squares(width, height)
        return ImageTokens(rows * columns, (1, rows, columns))

    def _squares(self, width: int, height: int) -> tuple[int, int]:
        side, area = self.side, width * height
        rows, columns = round(height / side), round(width / side)
        pixels = rows * columns * side * side
        if pixels > self.max_pixels:
            shrink = math.sqrt(area / self.max_pixels)
            return max(1, math.floor(height / shrink / side)), max(1, math.floor(width / shrink / side))
        if pixels < self.min_pixels:
            grow = math.sqrt(self.min_pixels / area)
            return math.ceil(height * grow / side), math.ceil(width * grow / side)
        return rows, columns
