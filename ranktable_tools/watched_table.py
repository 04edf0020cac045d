"""Look at a table file that others replace, again and again: tell what is new in it, and each trouble once."""

import hashlib
import os
from collections.abc import Callable
from typing import Generic, TypeVar

from ranktable_tools.errors import RanktableError

Table = TypeVar("Table")

_Stamp = tuple[int, ...]


class WatchedTable(Generic[Table]):
    """Owns what was read last. `read` makes a table of a path, or raises RanktableError; no look holds the file open.

    A link on the way to the file is followed anew at each look, as a ConfigMap's `..data`, so the folder it leads to
    may be swapped. Not for several threads at once.
    """

    def __init__(self, path: str, read: Callable[[str], Table], table: Table | None = None) -> None:
        """`table`: what the caller read before; None where it has none yet, or the file was not to be used."""
        self.path = path
        self.table = table
        self._read = read
        self._stamps: tuple[_Stamp | None, _Stamp | None] = (None, None)
        self._digest = b""
        self._told = ""
        self._suspect: RanktableError | None = None

    @property
    def in_trouble(self) -> bool:
        """Whether the file was not to be used when it was looked at last, told or not."""
        return bool(self._told) or self._suspect is not None

    def look(self) -> Table | RanktableError | None:
        """Return another table than before, or what is wrong with the file, or None where nothing is to be told.

        A file that is not whole yet (`not-completed`) is told at once. What is broken is told once it was seen in the
        same state twice, so that one written slowly is no trouble; the table before it stays. When what was told is
        over, the table is returned once, as it was too.
        """
        stamp = _stamp(self.path)
        # One more look at a file that did not change: its clock may be too coarse to show a second writing.
        if stamp is not None and self._stamps == (stamp, stamp) and self._suspect is None:
            return None
        self._stamps = (self._stamps[1], stamp)
        digest = _digest(self.path)
        if digest == self._digest and digest:
            return self._tell_suspect()
        self._digest = digest
        return self._take()

    def _take(self) -> Table | RanktableError | None:
        try:
            table = self._read(self.path)
        except RanktableError as error:
            return self._doubt(error)
        was_told = bool(self._told)
        self._suspect, self._told = None, ""
        if table == self.table and not was_told:
            return None
        self.table = table
        return table

    def _doubt(self, error: RanktableError) -> RanktableError | None:
        if error.code == "not-completed":
            self._suspect = None
            return self._tell(error)
        if self._digest:
            self._suspect = error
            return None
        if self._suspect is None or str(self._suspect) != str(error):  # no file: the one to replace it may be near
            self._suspect = error
            return None
        return self._tell_suspect()

    def _tell_suspect(self) -> RanktableError | None:
        error, self._suspect = self._suspect, None
        return None if error is None else self._tell(error)

    def _tell(self, error: RanktableError) -> RanktableError | None:
        if self._told == str(error):
            return None
        self._told = str(error)
        return error


def _stamp(path: str) -> _Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _digest(path: str) -> bytes:
    """Return the digest of the file's bytes, empty where it cannot be read: `read` says why."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return b""
