"""The input: read once from end to end before anything else, then line by line as requests are sent."""

import hashlib
import itertools
import os
import stat
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from batch.job import BatchStopped, InputLimits
from batch.lines import BadLine, parse_line, shown_id
from wire.errors import ConfigError

_MAX_SHOWN = 20
_SKIP_BYTES = 2**16
_MAGIC = {
    b"\xef\xbb\xbf": "begins with a byte order mark: save it as UTF-8 without one",
    b"\xff\xfe": "is UTF-16: save it as UTF-8",
    b"\xfe\xff": "is UTF-16: save it as UTF-8",
    b"\x1f\x8b": "is gzip-compressed: decompress it first",
}


class UnusableLines(ConfigError):
    """Lines of an input cannot be used; the message lists the first 20, one per line."""


class InputFile:
    """The requests of one input, by position from 0. Owns its descriptor; keeps 20 bytes of memory per request."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.digest = ""
        """sha256 of the whole file, in hex."""
        self._descriptor = descriptor
        self._offsets = array("Q")
        self._lengths = array("I")
        self._numbers = array("I")
        self._checksums = array("I")

    @classmethod
    def open(cls, path: Path, limits: InputLimits) -> Self:
        """Read the whole file. Raises ConfigError, and UnusableLines, which lists the unusable lines."""
        source = cls(path, _open(path))
        try:
            with os.fdopen(os.dup(source._descriptor), "rb") as file:
                source._check_all_lines(file, limits)
        except OSError as error:
            source.close()
            raise ConfigError(f"{path}: {error.strerror}") from error
        except BaseException:
            source.close()
            raise
        return source

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._offsets)

    def number(self, position: int) -> int:
        """Return the number of a request's line in the file, from 1."""
        return self._numbers[position]

    def line(self, position: int) -> bytes:
        """Return a request's line. Raises BatchStopped if it changed since the first read."""
        try:
            content = os.pread(self._descriptor, self._lengths[position], self._offsets[position])
        except OSError as error:
            raise BatchStopped(f"{self.path} can no longer be read: {error.strerror}") from error
        if zlib.crc32(content) != self._checksums[position]:
            raise BatchStopped(f"{self.path}: line {self.number(position)} was changed while the run read it")
        return content

    def is_at(self, path: Path) -> bool:
        """Return whether `path` is this file."""
        try:
            return os.path.samestat(path.stat(), os.fstat(self._descriptor))
        except OSError:
            return False

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _check_all_lines(self, file: BinaryIO, limits: InputLimits) -> None:
        size = os.fstat(self._descriptor).st_size
        if size > limits.max_bytes:
            raise ConfigError(f"{self.path} has {size} bytes, but the limit is {limits.max_bytes} (--max-input-bytes)")
        _check_magic(self.path, file.read(3))
        file.seek(0)
        problems, seen, digest = _Problems(), _CustomIds(), hashlib.sha256()
        end = 0
        for line in _lines(file, limits.max_line_bytes, digest.update):
            offset, end = end, end + line.length
            if not line.content.strip():
                continue
            if len(self) == limits.max_lines:
                raise ConfigError(f"{self.path} has more lines than the limit, {limits.max_lines} (--max-input-lines)")
            try:
                if line.num_bytes > limits.max_line_bytes:
                    limit = f"the limit is {limits.max_line_bytes} (--max-line-bytes)"
                    raise BadLine(f"has {line.num_bytes} bytes, but {limit}")
                seen.add(parse_line(line.content)["custom_id"], line.number)
            except BadLine as problem:
                problems.add(line.number, str(problem))
            self._add(offset, line.number, line.content)
        if end != size:
            why = "wait until no program writes to it"
            raise ConfigError(f"{self.path} was {size} bytes long, but {end} bytes were read: {why}")
        problems.check(self.path)
        self.digest = digest.hexdigest()

    def _add(self, offset: int, number: int, content: bytes) -> None:
        self._offsets.append(offset)
        self._lengths.append(len(content))
        self._numbers.append(number)
        self._checksums.append(zlib.crc32(content))


class _CustomIds:
    """The custom_ids so far, as digests, and the line of each."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def add(self, custom_id: str, number: int) -> None:
        """Add the custom_id of line `number`. Raises BadLine if an earlier line has it."""
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        first = self._numbers.setdefault(digest, number)
        if first != number:
            raise BadLine(f"repeats the custom_id {shown_id(custom_id)} of line {first}")


class _Problems:
    """Lines that cannot be used: all are counted, the first ones are shown."""

    def __init__(self) -> None:
        self._count = 0
        self._shown: list[str] = []

    def add(self, number: int, problem: str) -> None:
        """Add a line."""
        self._count += 1
        if len(self._shown) < _MAX_SHOWN:
            self._shown.append(f"line {number} {problem}")

    def check(self, path: Path) -> None:
        """Raise UnusableLines if there are any."""
        if not self._count:
            return
        more = [f"and {self._count - len(self._shown)} more"] if self._count > len(self._shown) else []
        lines = "1 line" if self._count == 1 else f"{self._count} lines"
        head = f"{path}: nothing was run, because {lines} cannot be used:"
        raise UnusableLines("\n  ".join((head, *self._shown, *more)))


@dataclass(frozen=True, slots=True)
class _Line:
    """A line. `num_bytes` counts its content, `length` also its line end. The content of a long line is truncated."""

    number: int
    content: bytes
    num_bytes: int
    length: int


def _lines(file: BinaryIO, limit: int, update: Callable[[bytes], None]) -> Iterator[_Line]:
    """Yield the lines; one longer than `limit` bytes is truncated."""
    for number in itertools.count(1):
        tail = begin = file.readline(limit + 2)
        if not begin:
            return
        update(begin)
        length = len(begin)
        while len(begin) > limit and not tail.endswith(b"\n") and (piece := file.readline(_SKIP_BYTES)):
            update(piece)
            tail = tail[-1:] + piece
            length += len(piece)
        end = len(tail) - len(tail.rstrip(b"\r\n"))
        yield _Line(number, begin.rstrip(b"\r\n"), length - end, length)


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # else opening a pipe would block
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path} is not a regular file: the input is read twice, so save it to a file first")
    return descriptor


def _check_magic(path: Path, begin: bytes) -> None:
    for magic, problem in _MAGIC.items():
        if begin.startswith(magic):
            raise ConfigError(f"{path} {problem}")
