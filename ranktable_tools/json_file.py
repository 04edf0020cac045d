"""Read JSON files strictly and write them whole: no duplicate keys in, no half files out."""

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import NoReturn

from ranktable_tools.errors import RanktableError

_MAX_BYTES = 16 * 1024 * 1024


def read_json(path: str) -> object:
    """Return the file's JSON value. Raises RanktableError naming the file, and the place of a key that stands twice."""
    text = _read_text(path)
    try:
        return _plain(json.loads(text, object_pairs_hook=_Pairs, parse_constant=_refuse_constant), "", path)
    except json.JSONDecodeError as error:
        raise RanktableError(f"{path}: not JSON: line {error.lineno} column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise RanktableError(f"{path}: not JSON: {error}") from error


def write_private(path: Path, text: str) -> None:
    """Write `text` to `path` with mode 0600 by an atomic rename. Raises RanktableError naming the file."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        raise RanktableError(f"{path}: cannot be written: {error.strerror or error}") from error


class _Pairs(list[tuple[str, object]]):
    """A JSON object as it stands in the file, repeated keys included."""


def _read_text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RanktableError(f"{path}: cannot be read: {reason}") from error
    if len(content) > _MAX_BYTES:
        raise RanktableError(f"{path}: larger than {_MAX_BYTES} bytes: not a ranktable")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RanktableError(f"{path}: not JSON: byte {error.start} is not UTF-8") from error


def _plain(value: object, place: str, path: str) -> object:
    if isinstance(value, _Pairs):
        plain: dict[str, object] = {}
        for key, member in value:
            name = json.dumps(key)
            here = f"{place}.{name[1:-1]}" if place else name[1:-1]
            if key in plain:
                raise RanktableError(f"{path}: {here}: the key {name} stands twice; keep one of them")
            plain[key] = _plain(member, here, path)
        return plain
    if isinstance(value, list):
        return [_plain(member, f"{place}[{index}]", path) for index, member in enumerate(value)]
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
