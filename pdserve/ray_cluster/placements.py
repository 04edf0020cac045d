"""The placement of instances on nodes, and the global table that follows it."""

from collections.abc import Sequence
from pathlib import Path

from ranktable_tools.dialects.modelarts import global_text
from ranktable_tools.digest import table_digest
from ranktable_tools.file_names import HOST, global_name, local_name
from ranktable_tools.table_file import write_global, write_local
from ranktable_tools.tables import GlobalTable, LocalTable, TableServer
from wire.errors import ConfigError


class Placements:
    """Owns the entries and the table file, which is replaced by a rename whenever an instance moves.

    A lost instance keeps its entry until it is placed again or another instance takes one
    of its devices or its port. No table is written before all are placed or while a role has no entry: the file then
    stays unchanged.
    """

    def __init__(self, names: Sequence[str], scheduler_ip: str, folder: Path) -> None:
        self._names = tuple(names)
        self._scheduler = TableServer(scheduler_ip, scheduler_ip)
        self._folder = folder
        self._entries: dict[str, TableServer] = {}
        self._lost: set[str] = set()
        self._written: GlobalTable | None = None

    @property
    def path(self) -> Path:
        """The path of the global table."""
        return self._folder / global_name(self._scheduler.server_ip)

    @property
    def scheduler_path(self) -> Path:
        """The path of the scheduler's local table."""
        return self._folder / local_name(self._scheduler.server_ip, HOST)

    def set_entry(self, name: str, server: TableServer) -> None:
        """Set an instance's entry. Raises ConfigError if another live instance has one of its devices or its port."""
        for other, theirs in list(self._entries.items()):
            clash = None if other == name else _find_clash(server, theirs)
            if clash is not None and other not in self._lost:
                raise ConfigError(f"{name} was given {clash} of {server.server_ip}, which {other} already has")
            if clash is not None:
                del self._entries[other]
        self._entries[name] = server
        self._lost.discard(name)

    def lose(self, name: str) -> None:
        """Mark an instance as lost."""
        self._lost.add(name)

    def table(self) -> GlobalTable | None:
        """Return the current table, None if it is incomplete."""
        if self._written is None and len(self._entries) < len(self._names):
            return None
        prefill, decode = (
            tuple(self._entries[name] for name in self._names if name in self._entries and name.startswith(role))
            for role in ("prefill-", "decode-")
        )
        return GlobalTable(self._scheduler, prefill, decode) if prefill and decode else None

    @property
    def text(self) -> str:
        """The text of the last table written; empty before the first."""
        return "" if self._written is None else global_text(self._written)

    def write(self) -> str | None:
        """Write the table if it has changed and return its digest, else None. Raises RanktableError."""
        table = self.table()
        if table is None or table == self._written:
            return None
        if self._written is None:
            write_local(self.scheduler_path, LocalTable(self._scheduler))
        write_global(self.path, table)
        self._written = table
        return table_digest(table)


def _find_clash(one: TableServer, other: TableServer) -> str | None:
    if one.server_ip != other.server_ip:
        return None
    shared = sorted(set(one.device_ids) & set(other.device_ids))
    if shared:
        return f"device {shared[0]}"
    return f"port {one.server_port}" if one.server_port == other.server_port else None
