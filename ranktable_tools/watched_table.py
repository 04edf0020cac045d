"""Poll a table file that others replace: return each new table, and each problem once."""

import hashlib
import os
from collections.abc import Callable
from typing import Generic, TypeVar

from ranktable_tools.errors import RanktableError

Table = TypeVar("Table")

_Stamp = tuple[int, ...]


class WatchedTable(Generic[Table]):
    """Owns the table read last. `read` parses a path or raises RanktableError; the file is not kept open between polls.

    Symbolic links in the path, such as a ConfigMap's `..data`, are resolved at each poll, so their target may be
    swapped. Not thread-safe.
    """

    def __init__(self, path: str, read: Callable[[str], Table], table: Table | None = None) -> None:
        """`table` is what the caller read before, None if it has none yet or the file was unusable."""
        self.path = path
        self.table = table
        self._read = read
        self._stamps: tuple[_Stamp | None, _Stamp | None] = (None, None)
        self._digest = b""
        self._reported = ""
        self._suspect: RanktableError | None = None

    @property
    def is_unusable(self) -> bool:
        """Whether the file was unusable at the last poll, reported or not."""
        return bool(self._reported) or self._suspect is not None

    def poll(self) -> Table | RanktableError | None:
        """Return a changed table, a problem of the file, or None if there is nothing new.

        A table that is not completed yet (`not-completed`) is reported at once. A broken one is reported once two polls
        have seen it in the same state, so that a slow write is not reported; the previous table stays. Once a reported
        problem is fixed, the table is returned once, even if unchanged.
        """
        stamp = _file_stamp(self.path)
        # Read once more after the stamp stops changing: its clock may be too coarse to show a second write.
        if stamp is not None and self._stamps == (stamp, stamp) and self._suspect is None:
            return None
        self._stamps = (self._stamps[1], stamp)
        digest = _digest(self.path)
        if digest == self._digest and digest:
            return self._report_suspect()
        self._digest = digest
        return self._take()

    def _take(self) -> Table | RanktableError | None:
        try:
            table = self._read(self.path)
        except RanktableError as error:
            return self._hold_back(error)
        was_reported = bool(self._reported)
        self._suspect, self._reported = None, ""
        if table == self.table and not was_reported:
            return None
        self.table = table
        return table

    def _hold_back(self, error: RanktableError) -> RanktableError | None:
        if error.code == "not-completed":
            self._suspect = None
            return self._report(error)
        if self._digest:
            self._suspect = error
            return None
        if self._suspect is None or str(self._suspect) != str(error):  # no file: its replacement may follow soon
            self._suspect = error
            return None
        return self._report_suspect()

    def _report_suspect(self) -> RanktableError | None:
        error, self._suspect = self._suspect, None
        return None if error is None else self._report(error)

    def _report(self, error: RanktableError) -> RanktableError | None:
        if self._reported == str(error):
            return None
        self._reported = str(error)
        return error


def _file_stamp(path: str) -> _Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _digest(path: str) -> bytes:
    """Return the digest of the file's bytes, empty if it cannot be read: `read` then reports why."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return b""
