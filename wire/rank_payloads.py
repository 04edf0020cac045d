"""What both sockets between rank 0 and another rank carry alike, as JSON: an error, and the fields of a dataclass."""

import dataclasses
import json
from typing import Any

from wire.errors import InternalError, PdserveError, from_name, to_name

_SHOWN_BYTES = 200


def pack_error(error: BaseException | None) -> bytes:
    """Return an error's name and words, nothing for none; what is none of our errors crosses as InternalError."""
    return b"" if error is None else json.dumps({"error": to_name(error), "text": str(error)}).encode()


def unpack_error(payload: bytes, before: str = "") -> PdserveError | None:
    """Return the error that `pack_error` was given, with `before` in front of its words."""
    if not payload:
        return None
    try:
        values = json.loads(payload)
        return from_name(str(values["error"]), f"{before}{values['text']}")
    except (ValueError, KeyError, TypeError):
        return InternalError(f"{before or 'a rank '}failed and said {payload[:_SHOWN_BYTES]!r}")


def read_object(payload: bytes, cls: type[Any]) -> dict[str, Any]:
    """Return the fields of a dataclass as they were dumped. Raises ValueError for any other fields than it has."""
    values = json.loads(payload)
    wanted = {field.name for field in dataclasses.fields(cls)}
    if not isinstance(values, dict) or values.keys() != wanted:
        raise ValueError(f"not a {cls.__name__}: {payload[:_SHOWN_BYTES]!r}")
    return values
