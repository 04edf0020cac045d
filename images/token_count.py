"""The tokens of one image, and the rule of families whose images all have the same number. Pure."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """How many tokens stand for an image, and their extent in time, height and width."""

    count: int
    grid: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class FixedCount:
    """Every image is resized to one size and has `count` tokens."""

    has_grid: ClassVar[bool] = False  # whether positions follow rows and columns of the tokens
    count: int

    @property
    def max_tokens(self) -> int:
        """The tokens of the largest image."""
        return self.count

    def tokens(self, width: int, height: int) -> ImageTokens:
        """Return the tokens of an image of any size; their grid is not used."""
        return ImageTokens(self.count, (1, 1, self.count))
