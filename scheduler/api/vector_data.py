"""Serialise the vectors of an answer, as numbers or in base64, within --max-answer-bytes."""

import asyncio
import base64
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import orjson

from scheduler.vectors import Values
from wire.errors import InvalidRequest

EncodingFormat = Literal["float", "base64"]
VectorType = Literal["float", "base64", "binary", "ubinary"]
"""Cohere's types of vectors. The last two: a bit for each dimension, 1 if above zero, as signed or unsigned bytes."""
_AT_ONCE = 16  # vectors serialised before yielding to the event loop


async def encode_vectors(
    vectors: Sequence[Values], rows: Sequence[int | None], kind: str, *, as_base64: bool, max_bytes: int
) -> list[orjson.Fragment]:  # fmt: skip
    """Return the serialised `data` of the answer, with values in the field that is named like the `kind`.

    `rows` is how many vectors each entry has, one after another; None for a single vector. Yields to the event loop
    between batches. Raises InvalidRequest if the answer is too long.
    """
    field = "embedding" if kind == "embedding" else "data"
    shown = (
        _to_base64(values) if as_base64 else values if count is None else _split(values, count)
        for values, count in zip(vectors, rows, strict=True)
    )
    entries = ({"object": kind, "index": index, field: one} for index, one in enumerate(shown))
    return await _serialise(entries, len(vectors), max_bytes)


async def encode_types(
    vectors: Sequence[Values], types: Sequence[VectorType], *, max_bytes: int
) -> dict[str, list[orjson.Fragment]]:  # fmt: skip
    """Return all vectors in each of the `types`. Raises InvalidRequest if they are more than `max_bytes`."""
    entries = (_in_type(values, name) for name in types for values in vectors)
    written, count = await _serialise(entries, len(vectors), max_bytes), len(vectors)
    return {name: written[at * count : (at + 1) * count] for at, name in enumerate(types)}


async def _serialise(entries: Iterable[Any], num_vectors: int, max_bytes: int) -> list[orjson.Fragment]:
    written, num_bytes = [], 0
    for index, entry in enumerate(entries):
        content = orjson.dumps(entry)
        num_bytes += len(content)
        if num_bytes > max_bytes:
            raise InvalidRequest(
                f"{num_vectors} vectors are more than {max_bytes} bytes (--max-answer-bytes): request fewer at a "
                "time, fewer dimensions or base64",
                "input",
            )
        written.append(orjson.Fragment(content))
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
    return written


def _in_type(values: Values, name: VectorType) -> Any:
    if name == "float":
        return values
    return _to_base64(values) if name == "base64" else _bits(values, offset=128 if name == "binary" else 0)


def _bits(values: Values, offset: int) -> list[int]:
    """Return a byte for the signs of each eight dimensions, the first in the highest bit, minus `offset`."""
    if len(values) % 8:
        raise InvalidRequest(
            f"embedding_types: {len(values)} dimensions do not fill whole bytes of 8 bits: use float or base64, or "
            "output_dimension",
            "embedding_types",
        )
    text = "".join("1" if value > 0 else "0" for value in values)
    return [int(text[at : at + 8], 2) - offset for at in range(0, len(text), 8)]


def _split(values: Values, count: int) -> list[Values]:
    width = len(values) // count
    return [values[at : at + width] for at in range(0, len(values), width)]


def _to_base64(values: Values) -> str:
    """Return little-endian float32 as base64, the encoding that OpenAI's client decodes."""
    numbers = array("f", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
