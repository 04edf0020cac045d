"""The embeddings of one prompt's images, and which rows of a step they replace. No torch."""

from collections.abc import Iterator, Sequence

from engine.interface import Embeddings
from engine.step import EmbeddedRows
from wire.errors import InternalError
from wire.types import PromptImage


class PromptImages:
    """Owner of the buffers: one for each image, [count, hidden_size] values row by row."""

    def __init__(self, images: Sequence[PromptImage], embeddings: Sequence[Embeddings], row_bytes: int) -> None:
        """Raises InternalError unless there is one buffer per image, with `row_bytes` bytes for each of its tokens."""
        if len(images) != len(embeddings):
            raise InternalError(f"the prompt has {len(images)} images, but embeddings for {len(embeddings)}")
        self._parts = [(image, memoryview(one).cast("B")) for image, one in zip(images, embeddings, strict=True)]
        for index, (image, values) in enumerate(self._parts):
            if len(values) != image.count * row_bytes:
                raise InternalError(
                    f"the embeddings of image {index} have {len(values)} bytes, but must have {image.count * row_bytes}"
                )
        self._row_bytes = row_bytes

    def within(self, start: int, count: int, row: int) -> Iterator[EmbeddedRows]:
        """Yield the rows that replace embeddings of tokens [start, start + count); token `start` is at `row`."""
        for image, values in self._parts:
            first, last = max(image.start, start), min(image.start + image.count, start + count)
            if first < last:
                part = values[(first - image.start) * self._row_bytes : (last - image.start) * self._row_bytes]
                yield EmbeddedRows(row + first - start, last - first, part)
