"""Embeddings of an image in a chat: a raw tensor in base64, checked against the model. Nothing is unpickled. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from images.checkpoint import VisionCheckpoint
from images.token_count import ImageTokens
from images.values import is_finite
from wire.errors import InvalidRequest
from wire.kv_layout import ITEM_BYTES

_FIELDS = ("data", "dtype", "shape", "grid")
_FORM = '{"data": base64 of the little-endian values, "dtype": "float32", "shape": [tokens, hidden size]}'


@dataclass(frozen=True, slots=True)
class SentEmbeds:
    """The values of a part, still in base64, with their type and number."""

    data: str
    dtype: str
    hidden_size: int
    tokens: ImageTokens

    def check(self, values: bytes) -> None:
        """Raise InvalidRequest unless the number of decoded values is as described and all are finite."""
        expected = self.tokens.count * self.hidden_size * ITEM_BYTES[self.dtype]
        if len(values) != expected:
            shape = f"shape [{self.tokens.count}, {self.hidden_size}] of {self.dtype}"
            raise InvalidRequest(f"image_embeds.data has {len(values)} bytes, but {shape} has {expected}")
        if not is_finite(values, self.dtype):
            raise InvalidRequest("image_embeds.data has a value that is NaN or infinite: all must be finite")


def read_embeds(given: Any, vision: VisionCheckpoint) -> SentEmbeds:
    """Return the fields of an `image_embeds` part. Raises InvalidRequest with the value and the limit."""
    if isinstance(given, str):
        raise InvalidRequest(f"image_embeds is a string, such as a pickled tensor; nothing is unpickled: send {_FORM}")
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"image_embeds must be {_FORM}")
    for name in given:
        if name not in _FIELDS:
            raise InvalidRequest(f"image_embeds has an unknown field {name[:40]!r}; known are {', '.join(_FIELDS)}")
    data, dtype = given.get("data"), given.get("dtype")
    if not isinstance(data, str):
        raise InvalidRequest("image_embeds.data must be a text: base64 of the little-endian values")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise InvalidRequest(f"image_embeds.dtype is {_shown(dtype)}, but must be one of {', '.join(ITEM_BYTES)}")
    count = _count(given.get("shape"), vision)
    return SentEmbeds(data, dtype, vision.hidden_size or 0, ImageTokens(count, _grid(given.get("grid"), count, vision)))


def _count(shape: Any, vision: VisionCheckpoint) -> int:
    """Return the number of tokens of the shape. Raises InvalidRequest if the model does not take it."""
    hidden, most = vision.hidden_size, vision.family.size_rule.max_tokens
    if hidden is None:
        raise InvalidRequest("image_embeds cannot be checked: the model's config.json has no hidden_size")
    match shape:
        case [count, width] if type(count) is int and 1 <= count <= most and width == hidden:
            return count
    raise InvalidRequest(
        f"image_embeds.shape is {_shown(shape)}, but must be [tokens, {hidden}] with 1 to {most} tokens: {hidden} is "
        "the model's hidden size"
    )


def _grid(grid: Any, count: int, vision: VisionCheckpoint) -> tuple[int, int, int]:
    """Return the grid of the tokens; it must be sent for a model whose positions follow it, and not for others."""
    kind = vision.family.model_type
    if not vision.family.size_rule.has_grid:
        if grid is not None:
            raise InvalidRequest(
                f"image_embeds.grid is {_shown(grid)}, but positions of {kind} have no grid: leave it out"
            )
        return 1, 1, count
    match grid:
        case [1, rows, columns] if type(rows) is type(columns) is int and rows > 0 and rows * columns == count:
            return 1, rows, columns
    raise InvalidRequest(
        f"image_embeds.grid is {_shown(grid)}, but must be [1, rows, columns] with rows x columns = {count}, the "
        f"number of tokens: positions of {kind} follow the grid"
    )


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:60]
