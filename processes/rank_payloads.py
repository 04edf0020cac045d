"""Payloads on both sockets between rank 0 and another rank: errors and dataclasses as JSON, and integers."""

import dataclasses
import json
import sys
from array import array
from itertools import repeat
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from wire.errors import InternalError, PdserveError, from_name, to_name

T = TypeVar("T")

_SHOWN_BYTES = 200


def pack_error(error: BaseException | None) -> bytes:
    """Return an error's name and message as JSON, b"" for None; an error that is not ours becomes InternalError."""
    return b"" if error is None else json.dumps({"error": to_name(error), "text": str(error)}).encode()


def unpack_error(payload: bytes, before: str = "") -> PdserveError | None:
    """Return the error packed by `pack_error`, with `before` prepended to its message; None for an empty payload."""
    if not payload:
        return None
    try:
        values = json.loads(payload)
        return from_name(str(values["error"]), f"{before}{values['text']}")
    except (ValueError, KeyError, TypeError):
        return InternalError(f"{before or 'a rank '}failed and sent {payload[:_SHOWN_BYTES]!r}")


def to_json(value: object) -> bytes:
    """Return a dataclass, or a list of dataclasses, as JSON for `from_json`."""
    return json.dumps(value, default=dataclasses.asdict).encode()


def from_json(kind: type[T], payload: bytes) -> T:
    """Return the `kind` that `to_json` packed. Raises ValueError if the fields are not exactly those of `kind`."""
    read: T = _read(kind, json.loads(payload))
    return read


def _read(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            raise ValueError(f"not a {kind.__name__}: {str(value)[:_SHOWN_BYTES]}")  # type: ignore[union-attr]
        return kind(**{name: _read(hints[name], one) for name, one in value.items()})  # type: ignore[operator]
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        return tuple(map(_read, repeat(first) if others == [...] else (first, *others), value))
    if isinstance(kind, UnionType):
        return None if value is None else _read(get_args(kind)[0], value)
    return value


def little_endian(values: "array[int]") -> "array[int]":
    """Swap the bytes where this machine is big-endian, and return the same array."""
    if sys.byteorder == "big":
        values.byteswap()
    return values
