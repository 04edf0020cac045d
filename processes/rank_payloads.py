"""JSON payloads on both sockets between rank 0 and another rank: errors, and the fields of dataclasses."""

import dataclasses
import json
from typing import Any

from wire.errors import InternalError, PdserveError, from_name, to_name

_SHOWN_BYTES = 200


def pack_error(error: BaseException | None) -> bytes:
    """Return an error's name and message as JSON, b"" for None; a foreign error crosses as InternalError."""
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


def read_object(payload: bytes, cls: type[Any]) -> dict[str, Any]:
    """Return the fields of a dumped dataclass. Raises ValueError if they are not exactly the fields of `cls`."""
    values = json.loads(payload)
    wanted = {field.name for field in dataclasses.fields(cls)}
    if not isinstance(values, dict) or values.keys() != wanted:
        raise ValueError(f"not a {cls.__name__}: {payload[:_SHOWN_BYTES]!r}")
    return values
