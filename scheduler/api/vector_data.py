"""Serialise the vectors of an answer, as numbers or in base64, within --max-answer-bytes."""

import asyncio
import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Literal

import orjson

from scheduler.vectors import Values
from wire.errors import InvalidRequest

EncodingFormat = Literal["float", "base64"]
_AT_ONCE = 16  # vectors serialised before yielding to the event loop


async def encode_vectors(
    vectors: Sequence[Values], rows: Sequence[int | None], kind: str, *, as_base64: bool, max_bytes: int
) -> list[orjson.Fragment]:  # fmt: skip
    """Return the serialised `data` of the answer, with values in the field that is named like the `kind`.

    `rows` is how many vectors each entry has, one after another; None for a single vector. Yields to the event loop
    between batches. Raises InvalidRequest if the answer is too long.
    """
    field = "embedding" if kind == "embedding" else "data"
    written, num_bytes = [], 0
    for index, (values, count) in enumerate(zip(vectors, rows, strict=True)):
        shown = _to_base64(values) if as_base64 else values if count is None else _split(values, count)
        content = orjson.dumps({"object": kind, "index": index, field: shown})
        num_bytes += len(content)
        if num_bytes > max_bytes:
            raise InvalidRequest(
                f"{len(vectors)} vectors are more than {max_bytes} bytes (--max-answer-bytes): request fewer at a "
                "time, fewer dimensions or base64",
                "input",
            )
        written.append(orjson.Fragment(content))
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
    return written


def _split(values: Values, count: int) -> list[Values]:
    width = len(values) // count
    return [values[at : at + width] for at in range(0, len(values), width)]


def _to_base64(values: Values) -> str:
    """Return little-endian float32 as base64, the encoding that OpenAI's client decodes."""
    numbers = array("f", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
