"""Report in sentences how a watched table changes: members added or removed, and unusable versions."""

from collections.abc import Callable
from dataclasses import dataclass

from ranktable_tools.diff import diff
from ranktable_tools.digest import table_digest
from ranktable_tools.errors import RanktableError
from ranktable_tools.table_file import part_of
from ranktable_tools.tables import Table, whole
from ranktable_tools.watched_table import WatchedTable

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Seen:
    """A table as read, and its digest if pdserve can start from it: None for other dialects and partial tables."""

    table: Table
    digest: str | None


def seen(table: Table, *, is_ours: bool) -> Seen:
    """Return a table with its digest; `is_ours` means the guide's dialect."""
    found = whole(part_of(table)) if is_ours and table.kind == "cluster" else None
    return Seen(table, None if found is None else table_digest(found))


class Watch:
    """Owns the last shown table and its version: the number of tables seen so far that differ in meaning."""

    def __init__(self, file: WatchedTable[Seen], say: Say) -> None:
        self._file = file
        self._say = say
        self._last: Seen | None = None
        self._has_error = False
        self.version = 0

    def poll(self) -> None:
        """Read the table once and report changes."""
        found = self._file.poll()
        if isinstance(found, RanktableError):
            self._has_error = True
            self._say(_describe_error(found, self._last))
        elif found is not None:
            self._take(found)

    def _take(self, found: Seen) -> None:
        before, self._last = self._last, found
        had_error, self._has_error = self._has_error, False
        if before is None:
            self.version = 1
            self._say(f"{self._version_text(found)}: {found.table.role_counts()}")
            return
        sentences = diff(before.table, found.table)
        if sentences:
            self.version += 1
            self._say(f"{self._version_text(found)}: {' '.join(sentences)}")
        elif had_error:
            self._say(f"valid again: the table of {self._version_text(found)}")

    def _version_text(self, found: Seen) -> str:
        return f"version {self.version}" + ("" if found.digest is None else f", digest {found.digest}")


def _describe_error(error: RanktableError, last: Seen | None) -> str:
    kept = "" if last is None else "; the previous table stays in use"
    return f"{'waiting' if error.code == 'not-completed' else 'ignored'}: {error}{kept}"
