"""Serialise the vectors of an answer, as numbers, in base64 or as bytes, within --max-answer-bytes."""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from pydantic import BaseModel

from scheduler.api.vector_bytes import BYTES_OF, EmbedDtype, Endianness, to_bytes
from scheduler.vectors import Values
from wire.errors import InvalidRequest

_MAX_METADATA_BYTES = 32 * 2**10  # a header: clients allow 64 KiB in all
_AT_ONCE = 16  # vectors serialised before yielding to the event loop


class EncodedBody(BaseModel):
    """The fields for how vectors are written; the last two are for all formats but float."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: EmbedDtype | None = None
    endianness: Endianness | None = None


@dataclass(frozen=True, slots=True)
class VectorBytes:
    """The vectors of an answer as bytes, and the rest of the answer as JSON, for the header `metadata`."""

    content: bytes
    metadata: bytes | None


async def encode_answer(
    answer: Mapping[str, Any], vectors: Sequence[Values], rows: Sequence[int | None], kind: str, wanted: EncodedBody,
    max_bytes: int,
) -> dict[str, Any] | VectorBytes:  # fmt: skip
    """Return the answer with its vectors in the requested format. Raises InvalidRequest if it is too long."""
    if wanted.encoding_format not in ("bytes", "bytes_only"):
        return {**answer, "data": await _encode_vectors(vectors, rows, kind, wanted, max_bytes)}
    dtype, order = wanted.embed_dtype or "float32", wanted.endianness or "native"
    num_bytes = BYTES_OF[dtype] * sum(map(len, vectors))
    _check(num_bytes, len(vectors), max_bytes)
    written = [to_bytes(values, dtype, order) for values in vectors]
    metadata = None
    if wanted.encoding_format == "bytes":
        items = _items(written, vectors, rows, {"embed_dtype": dtype, "endianness": order})
        metadata = orjson.dumps({name: value for name, value in answer.items() if name != "object"} | {"data": items})
        if len(metadata) > _MAX_METADATA_BYTES:
            raise InvalidRequest(
                f"the metadata of {len(vectors)} vectors is {len(metadata)} bytes, but a header has at most "
                f"{_MAX_METADATA_BYTES}: request fewer at a time, or bytes_only",
                "input",
            )
    return VectorBytes(b"".join(written), metadata)


def _items(
    written: Sequence[bytes], vectors: Sequence[Values], rows: Sequence[int | None], fields: Mapping[str, str]
) -> list[dict[str, Any]]:
    items, start = [], 0
    for index, (content, values, count) in enumerate(zip(written, vectors, rows, strict=True)):
        shape = [len(values)] if count is None else [count, len(values) // count]
        items.append({"index": index, **fields, "start": start, "end": start + len(content), "shape": shape})
        start += len(content)
    return items


async def _encode_vectors(
    vectors: Sequence[Values], rows: Sequence[int | None], kind: str, wanted: EncodedBody, max_bytes: int
) -> list[orjson.Fragment]:
    """Return the serialised `data` of the answer, with values in the field that is named like the `kind`.

    `rows` is how many vectors each entry has, one after another; None for a single vector. Yields to the event loop
    between batches. Raises InvalidRequest if the answer is too long.
    """
    field, as_base64 = "embedding" if kind == "embedding" else "data", wanted.encoding_format == "base64"
    dtype, order = wanted.embed_dtype or "float32", wanted.endianness or "little"
    written, num_bytes = [], 0
    for index, (values, count) in enumerate(zip(vectors, rows, strict=True)):
        shown = (
            base64.b64encode(to_bytes(values, dtype, order)).decode()
            if as_base64
            else values
            if count is None
            else _split(values, count)
        )
        content = orjson.dumps({"object": kind, "index": index, field: shown})
        num_bytes += len(content)
        _check(num_bytes, len(vectors), max_bytes)
        written.append(orjson.Fragment(content))
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
    return written


def _split(values: Values, count: int) -> list[Values]:
    width = len(values) // count
    return [values[at : at + width] for at in range(0, len(values), width)]


def _check(num_bytes: int, num_vectors: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise InvalidRequest(
            f"{num_vectors} vector{' takes' if num_vectors == 1 else 's take'} more than {max_bytes} bytes "
            "(--max-answer-bytes): request fewer at a time, fewer dimensions or base64",
            "input",
        )
