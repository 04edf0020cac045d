"""The shapes of a picture, in pixels from its upper left corner."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, filled or with only a border."""

    x: float
    y: float
    width: float
    height: float
    fill: str | None = None
    border: str | None = None


@dataclass(frozen=True, slots=True)
class Path:
    """A line through points."""

    points: Sequence[tuple[float, float]]
    colour: str
    width: float = 1.0


@dataclass(frozen=True, slots=True)
class Label:
    """Text with its baseline at `y`, to the right of, centred on or to the left of `x`."""

    x: float
    y: float
    words: str
    anchor: Literal["start", "middle", "end"] = "start"
    size: int = 12
    colour: str = "#222222"


Shape = Box | Path | Label


@dataclass(frozen=True, slots=True)
class Picture:
    """Shapes on white, later ones over earlier ones."""

    width: int
    height: int
    shapes: Sequence[Shape]
