"""Read JSON files strictly, without duplicate keys or excessive sizes, and write files atomically."""

import contextlib
import errno
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

from ranktable_tools.errors import RanktableError
from ranktable_tools.owner import whose

_MAX_BYTES = 16 * 1024 * 1024
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # a file system without hard links
_MAX_DEPTH = 32
_MAX_DIGITS = 640  # Python converts this many digits whatever its configured limit is
# Pipes opened for this process, such as a shell's <(...): they have a writer.
_OWN_PIPE = re.compile(r"/dev/stdin|(/dev|/proc/self)/fd/[0-9]+")
# One bracket, or a whole string, closed or not: brackets inside a string are not matched.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)


def read_json(path: str) -> object:
    """Return the file's JSON value. Raises RanktableError naming the file, and the place of a duplicate key."""
    return parse_json(_read_text(path), path)


def parse_json(text: str, path: str) -> object:
    """Return the JSON value of a text. Raises RanktableError, which calls the text `path`, if it is not JSON."""
    _check_depth(path, text)
    try:
        value = json.loads(
            text, object_pairs_hook=_Pairs, parse_int=partial(_whole_number, path), parse_constant=_refuse_constant
        )
        return _to_plain(value, "", path)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        if re.match(r"//|/\*|#", text[error.pos : error.pos + 2]):
            message = f"{path}: not JSON: {where}: a comment; JSON has no comments, remove it"
            raise RanktableError(message, code="json-comment", json_path=where) from error
        raise RanktableError(f"{path}: not JSON: {where}: {error.msg}", code="not-json", json_path=where) from error
    except (ValueError, RecursionError) as error:
        raise RanktableError(f"{path}: not JSON: {error}", code="not-json") from error


def write_private(path: Path, text: str) -> None:
    """Write `text` to `path`, mode 0600, by an atomic rename. Raises RanktableError naming the file."""
    with _temporary_file(path, text) as draft:
        draft.replace(path)


def write_private_first(path: Path, text: str) -> bool:
    """Write a file that does not exist yet; return False if it exists. Raises RanktableError naming the file.

    Of concurrent writers the first one wins, except on a file system without hard links, where the last one does.
    """
    with _temporary_file(path, text) as draft:
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            draft.replace(path)
    return True


@contextlib.contextmanager
def _temporary_file(path: Path, text: str) -> Iterator[Path]:
    """Yield a temporary file beside `path` with the text, synced to disk; it is removed at the end if still there."""
    draft: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        draft = Path(name)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    except OSError as error:
        raise RanktableError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        if draft is not None:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)


class _Pairs(list[tuple[str, object]]):
    """A JSON object as written in the file, including repeated keys."""


def _read_text(path: str) -> str:
    if not path:
        raise RanktableError("'': the file name is empty; is a variable not set?", code="unreadable")
    try:
        _refuse_what_may_hang(path)
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        owner = f"; {whose(Path(path))}" if isinstance(error, PermissionError) else ""
        raise RanktableError(f"{path}: cannot be read: {reason}{owner}", code="unreadable") from error
    if len(content) > _MAX_BYTES:
        raise RanktableError(f"{path}: larger than {_MAX_BYTES} bytes, the limit for a ranktable", code="too-large")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"{path}: not JSON: byte {error.start} is not UTF-8"
        raise RanktableError(message, code="not-json") from error


def _refuse_what_may_hang(path: str) -> None:
    """Raise RanktableError for a pipe or a device: its open or read blocks until there is a writer."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or _OWN_PIPE.fullmatch(path)):
        message = f"{path}: not a regular file; name a file, or /dev/stdin for a pipe"
        raise RanktableError(message, code="unreadable")


def _check_depth(path: str, text: str) -> None:
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        if match[0] in "[{":
            depth += 1
        elif match[0] in "]}":
            depth -= 1
        if depth > _MAX_DEPTH:
            message = f"{path}: lists and objects are nested more than {_MAX_DEPTH} deep, the limit for a ranktable"
            raise RanktableError(message, code="too-deep")


def _to_plain(value: object, json_path: str, path: str) -> object:
    if isinstance(value, _Pairs):
        plain: dict[str, object] = {}
        for key, member in value:
            name = json.dumps(key)
            here = f"{json_path}.{name[1:-1]}" if json_path else name[1:-1]
            if key in plain:
                message = f"{path}: {here}: duplicate key {name}; keep one of them"
                raise RanktableError(message, code="duplicate-key", json_path=here, value=key)
            plain[key] = _to_plain(member, here, path)
        return plain
    if isinstance(value, list):
        return [_to_plain(member, f"{json_path}[{index}]", path) for index, member in enumerate(value)]
    return value


def _whole_number(path: str, text: str) -> int:
    digits = len(text.lstrip("-"))
    if digits > _MAX_DIGITS:
        message = f"{path}: a number of {digits} digits; the limit is {_MAX_DIGITS}"
        raise RanktableError(message, code="too-large")
    return int(text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
